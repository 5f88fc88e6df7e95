"""The command: what it prints and writes, on rollouts of others and on our own shards."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from pipelines.cli import READER_GONE, main
from tests.unit.audit_data import sample, write_jsonl
from tests.unit.builders import make_rollout
from trm_repro.shards import MaskRow, write_masks, write_rollouts

ROOT = Path(__file__).resolve().parents[2]


def test_json_has_the_documented_keys_and_the_terminal_the_headline(tmp_path, capsys):
    path = write_jsonl(tmp_path / "rollouts.jsonl", sample(30))
    out, page = tmp_path / "out.json", tmp_path / "out.html"
    arguments = [
        "--json",
        str(out),
        "--html",
        str(page),
        "--thresholds",
        "trm_max=0.01,0.2",
        "--gates",
        "icepop:high=2",
    ]
    assert main(["audit", str(path), *arguments]) == 0
    payload = json.loads(out.read_text())
    for name in ("num_sequences", "num_tokens", "ppl_gap", "k1_mean", "k2_mean", "k3_mean", "k2_max"):
        assert isinstance(payload[name], int | float), name
    assert {"trm_max_0.1_avg_0.002", "trm_max_0.01", "trm_max_0.2"} <= set(payload["acceptance"])
    assert payload["gates"]["icepop:high=2"]["thresholds"] == {"low": 0.5, "high": 2.0}
    cells = re.findall(r"^\| (`[^|]*) \|", (ROOT / "docs" / "audit.md").read_text(), re.MULTILINE)
    documented = {name for cell in cells for name in re.findall(r"`([a-z0-9_]+)`", cell)}
    assert set(payload) - documented == set()
    text = capsys.readouterr().out
    assert f"{payload['num_sequences']} sequences, {payload['num_tokens']:,} tokens" in text
    assert f"{payload['acceptance']['trm_max_0.1']:.1%}" in text
    html = page.read_text()
    assert "Audit of rollouts" in html
    assert not re.search(r"""(src|href)=["']?https?:""", html)


def test_quick_leaves_out_what_takes_longest_and_agrees_on_the_rest(tmp_path):
    path = write_jsonl(tmp_path / "rollouts.jsonl", sample(30))
    results = {}
    for options in ((), ("--quick",)):
        assert main(["audit", str(path), "--json", str(tmp_path / "out.json"), *options]) == 0
        results[options] = json.loads((tmp_path / "out.json").read_text())
    quick, full = results["--quick",], results[()]
    assert "where" not in quick
    assert "gates" not in quick
    assert quick["acceptance"] == full["acceptance"]
    assert quick["ppl_gap"] == full["ppl_gap"]


def test_a_quick_audit_still_says_what_it_left_out(tmp_path, capsys):
    path = write_jsonl(tmp_path / "rollouts.jsonl", sample(3))
    path.write_text(path.read_text() + "no json\n")
    assert main(["audit", str(path), "--quick", "--skip-bad"]) == 0
    text = capsys.readouterr().out
    assert "! 1 bad row was left out\n" in text
    assert f"{path}: line 4: is no JSON" in text
    assert "columns not used" not in text


def test_folders_and_globs_are_read_in_order(tmp_path):
    rows = sample(20)
    (tmp_path / "dump").mkdir()
    for index in range(2):
        write_jsonl(tmp_path / "dump" / f"{index}.jsonl", rows[10 * index : 10 * index + 10])
    (tmp_path / "dump" / "readme.txt").write_text("no dump")
    for pattern in (tmp_path / "dump", tmp_path / "dump" / "*.jsonl"):
        assert main(["audit", str(pattern), "--json", str(tmp_path / "out.json")]) == 0
        payload = json.loads((tmp_path / "out.json").read_text())
        assert payload["num_sequences"] == 20
        assert [Path(file).name for file in payload["files"]] == ["0.jsonl", "1.jsonl"]


def own_run(folder, *, with_kl):
    """Write two steps of shards and masks; sequence 1 is seen by two updates, of which the first one counts."""
    rollouts = {step: [make_rollout(3 + i, reward=i % 2, advantage=i - 1.0, seed=step * 10 + i) for i in range(3)]
                for step in range(2)}  # fmt: skip
    for step, own in rollouts.items():
        write_rollouts(folder / "shards" / f"step_{step:05}.parquet", own, step)
        masks = [
            MaskRow(
                update=update,
                sequence_id=i,
                kept=True,
                policy_logprobs=own[i].logprobs - 0.01 * (i + 1) - update,
                token_kl=torch.full((3 + i,), 0.02 * (i + 1)) if with_kl else None,
            )
            for update, i in ((1, 1), (0, 2), (0, 1), (0, 0))
        ]
        write_masks(folder / "masks" / f"step_{step:05}.parquet", masks, step)
    return rollouts


@pytest.mark.parametrize("with_kl", [True, False])
def test_a_run_folder_of_ours_joins_shards_with_the_masks_of_the_first_update(tmp_path, with_kl):
    own_run(tmp_path / "run", with_kl=with_kl)
    (tmp_path / "run" / "metrics.jsonl").write_text('{"kind": "not rollouts"}\n')
    assert main(["audit", str(tmp_path / "run"), "--json", str(tmp_path / "out.json")]) == 0
    payload = json.loads((tmp_path / "out.json").read_text())
    assert payload["formats"] == {"trm-repro": 2}
    assert payload["num_sequences"] == 6
    assert payload["ppl_gap"] == pytest.approx(np.mean([0.01, 0.02, 0.03]), abs=1e-6)
    assert payload["estimator"] == ("exact" if with_kl else "sampled")
    assert payload["acceptance"]["trm_max_0.05"] == pytest.approx(2 / 3 if with_kl else 1.0)
    assert [row["step"] for row in payload["steps"]] == [0, 1]
    if with_kl:
        assert payload["kl_max"] == pytest.approx(0.06)


def test_a_shard_without_masks_says_how_to_make_them(tmp_path, capsys):
    own_run(tmp_path / "run", with_kl=True)
    for file in (tmp_path / "run" / "masks").iterdir():
        file.unlink()
    assert main(["audit", str(tmp_path / "run")]) == 2
    assert "trm-repro mask" in capsys.readouterr().err


def test_audit_needs_neither_vllm_nor_lightning_nor_mlflow(tmp_path):
    path = write_jsonl(tmp_path / "rollouts.jsonl", sample(5))
    code = (
        "import sys; from pipelines.cli import main; "
        f"code = main(['audit', {str(path)!r}]); "
        "bad = {'vllm', 'lightning', 'mlflow', 'transformers', 'matplotlib', 'pandas'} & set(sys.modules); "
        "sys.exit(f'{code} {bad}' if code or bad else 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_a_reader_that_goes_away_ends_an_audit_without_a_traceback_and_with_its_files(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", sample(20))
    command = [sys.executable, "-m", "pipelines.cli", "audit", str(path), "--quick", "--json", str(tmp_path / "o.json")]
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "w") as gone:
        ended = subprocess.run(command, stdout=gone, stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False)
    assert (ended.returncode, ended.stderr) == (READER_GONE, "")
    assert json.loads((tmp_path / "o.json").read_text())["num_sequences"] == 20


def test_thresholds_may_be_given_several_at_once_and_a_wrong_one_is_named(tmp_path, capsys):
    path = write_jsonl(tmp_path / "a.jsonl", sample(20))
    words = [
        "audit",
        str(path),
        "--quick",
        "--json",
        str(tmp_path / "o.json"),
        "--thresholds",
        "trm_max=0.3",
        "ser=0.2",
    ]
    assert main(words) == 0
    assert {"trm_max_0.3", "ser_0.2"} <= set(json.loads((tmp_path / "o.json").read_text())["acceptance"])
    assert main([*words[:-2], "trm_max=x"]) == 2
    assert "--thresholds 'trm_max=x': expected finite numbers > 0" in capsys.readouterr().err
