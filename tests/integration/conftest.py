"""The order of integration tests: files that take longest first, so that two test processes end at about the same time.

`make test` hands whole files to whichever process is free (--dist loadfile --no-loadscope-reorder).
"""

import pytest

LONGEST_FIRST = (
    "test_reproduce.py",
    "test_chaos.py",
    "test_vllm_engine.py",
    "test_placements.py",
    "test_tracking_server.py",
    "test_ranks.py",
    "test_hidden_states.py",
    "test_fake_8b.py",
    "test_evaluate.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files that take longest first; those not listed keep their order."""
    places = {name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))
