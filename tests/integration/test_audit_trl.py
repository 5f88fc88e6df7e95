"""An audit of what the real TRL holds while it trains on a CPU, and an audit as a run of the real MLflow."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from pipelines.cli import main
from tests.unit.audit_data import sample, write_jsonl

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "trl_trm.py"


def test_tensors_that_trl_trains_on_are_audited(tmp_path):
    pytest.importorskip("trl", reason="TRL is not installed: pip install --no-deps -r requirements/dev.txt")
    spec = importlib.util.spec_from_file_location("trl_trm", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    dumps = []

    class Dumper(example.TRMTrainer):
        def _compute_loss(self, model, inputs):
            with torch.no_grad():
                policy = self.policy_logprobs(model, inputs)
            names = ("completion_ids", "completion_mask", "advantages", "old_per_token_logps")
            tensors = {name: inputs[name].detach().clone() for name in names}
            dumps.append(tensors | {"per_token_logps": policy})
            torch.save(dumps[-1], tmp_path / f"update_{len(dumps)}.pt")
            return super()._compute_loss(model, inputs)

    example.tiny_trainer(str(tmp_path / "trl"), trainer=Dumper, gate="none").train()
    assert len(dumps) == 4
    # Without vLLM, TRL keeps the log-probs of the model that sampled as old_per_token_logps.
    maps = ["--map", "rollout_logprobs=old_per_token_logps", "--map", "policy_logprobs=per_token_logps"]
    out = tmp_path / "out.json"
    assert main(["audit", str(tmp_path / "update_*.pt"), "--format", "trl", *maps, "--json", str(out)]) == 0
    payload = json.loads(out.read_text())
    gaps, k2 = [], []
    for dump in dumps:
        mask = dump["completion_mask"].bool().numpy()
        x = (dump["per_token_logps"] - dump["old_per_token_logps"]).double().numpy()
        gaps += [abs(row[keep].mean()) for row, keep in zip(x, mask, strict=True)]
        k2.append(x[mask] ** 2 / 2)
    assert payload["formats"] == {"trl": 4}
    assert payload["num_sequences"] == 32
    assert payload["ppl_gap"] == pytest.approx(np.mean(gaps), rel=1e-5)
    assert payload["k2_max"] == pytest.approx(np.concatenate(k2).max(), rel=1e-5)
    assert payload["k2_max"] > 1e-4  # the later updates are off-policy


def test_an_audit_is_recorded_as_an_mlflow_run(tmp_path):
    from mlflow import MlflowClient

    path = write_jsonl(tmp_path / "rollouts.jsonl", sample(30))
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    assert main(["audit", str(path), "--mlflow", uri, "--experiment", "audits"]) == 0
    client = MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name("audits").experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.metrics["audit/num_sequences"] == 30
    assert 0 <= run.data.metrics["acceptance/trm_max_0.1_avg_0.002"] <= 1
    assert [m.step for m in client.get_metric_history(run.info.run_id, "divergence/ppl_gap")] == [0, 1, 2]
    payload = json.loads(Path(client.download_artifacts(run.info.run_id, "audit.json", str(tmp_path))).read_text())
    by_step = client.get_metric_history(run.info.run_id, "acceptance_by_step/trm_avg_0.002")
    assert [m.value for m in by_step] == [row["acceptance"]["trm_avg_0.002"] for row in payload["steps"]]
    assert "gates_by_step/sequence_mis/low_0/high_3" in run.data.metrics
    assert payload["ppl_gap"] == pytest.approx(run.data.metrics["audit/ppl_gap"])
