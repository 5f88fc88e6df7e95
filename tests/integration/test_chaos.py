from pathlib import Path

import pytest

from tests.chaos import disturbed, outcome, undisturbed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_ten_kills_at_random_moments_change_no_metric_weight_shard_or_point(tmp_path: Path):
    warm_starts = tmp_path / "warm_starts"
    undisturbed(tmp_path / "undisturbed", warm_starts)
    report = disturbed(tmp_path / "disturbed", warm_starts, kills=10, seed=3)
    first, second = outcome(tmp_path / "undisturbed"), outcome(tmp_path / "disturbed")
    assert sorted(first) == sorted(second)
    assert [name for name in first if first[name] != second[name]] == []
    assert {count for *_, count, _ in first["points"]} == {1}
    assert report.kills.total() >= 5, "the run ended before it was disturbed"
