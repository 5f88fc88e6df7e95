from pathlib import Path

import pytest

from tests.chaos import kill_inside_stages
from tests.killed_inside import STAGES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_ten_kills_that_fall_inside_every_stage_change_no_metric_weight_shard_or_point(tmp_path: Path):
    report, first, second = kill_inside_stages(tmp_path, kills=10, seed=3)
    assert set(report.kills) == set(STAGES)
    assert report.kills.total() == 10
    assert len(first) > 10
    assert sorted(first) == sorted(second)
    assert [name for name in first if first[name] != second[name]] == []
    assert {count for *_, count, _ in first["points"]} == {1}
