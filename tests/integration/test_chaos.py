from pathlib import Path

import pytest

from tests.chaos import kill_inside_stages
from tests.killed_inside import STAGES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


SECRETS = {
    name: f"planted-{number}-hunter2"
    for number, name in enumerate(
        ("HF_TOKEN", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY")
    )
}


def test_ten_kills_that_fall_inside_every_stage_change_no_metric_weight_shard_or_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name, secret in SECRETS.items():
        monkeypatch.setenv(name, secret)
    report, first, second = kill_inside_stages(tmp_path, kills=10, seed=3)
    assert set(report.kills) == set(STAGES)
    assert report.kills.total() == 10
    assert len(first) > 10
    assert sorted(first) == sorted(second)
    assert [name for name in first if first[name] != second[name]] == []
    assert {count for *_, count, _ in first["points"]} == {1}
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"metrics.jsonl", "mlflow.db", "checkpoint.ckpt", "log.txt", "environment.json"} <= {f.name for f in files}
    assert [path for path in files if b"hunter2" in path.read_bytes()] == [], "a secret of the environment was stored"
