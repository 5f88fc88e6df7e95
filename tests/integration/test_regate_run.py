"""Re-gating a run that really trained: its own arm meets its own decisions again."""

import json

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_trained_run_replayed_under_its_own_arm_keeps_what_it_kept(cli, smoke, tmp_path):
    run = smoke / "runs" / "trm_avg_0.001" / "seed_1"
    done = cli("regate", run, "--arm", "trm_avg_0.001", "--gate", "none", "--gate", "icepop", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    gates = json.loads((tmp_path / "regate.json").read_text())["gates"]
    assert gates["arm trm_avg_0.001"] == gates["stored"]
    assert gates["none"]["kept_token_fraction"] == 1.0
    assert (tmp_path / "regate.png").stat().st_size > 10_000
