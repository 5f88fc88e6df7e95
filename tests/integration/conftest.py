"""The order of integration tests."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run engines of experts first: vLLM keeps the first groups of a process, and a dense engine has none for them."""
    items.sort(key=lambda item: item.path.name != "test_vllm_engine.py" if "integration" in item.path.parts else False)
