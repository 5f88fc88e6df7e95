"""What the README and docs tell a reader to type or open is there."""

import re
from pathlib import Path

import pytest
import torch

from pipelines.cli import COMMANDS
from tests.conftest import ROOT
from trm_repro.config import load_config

README = (ROOT / "README.md").read_text()
IMPORT_EXAMPLE = README.split("## Import it")[1].split("\n## ")[0]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_first_command_stands_within_twenty_lines():
    lines = README.splitlines()
    assert any(line.strip() == "make reproduce" for line in lines[:20])


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_command_named_is_one(document: Path):
    named = set(re.findall(r"`(?:[^`]*?)trm-repro ([a-z-]+)", document.read_text()))
    assert named - {"--help"} <= set(COMMANDS)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_make_target_named_is_one(document: Path):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:^|`|    )make ([a-z-]+)", document.read_text(), re.MULTILINE)) <= targets


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_to_a_file_leads_somewhere(document: Path):
    for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
        if not target.startswith("https://"):
            assert (document.parent / target).exists(), target


def test_every_override_shown_is_accepted():
    for override in re.findall(r"\b([a-z_]+(?:\.[a-z_]+)*=[^\s`,]+)", README.replace(IMPORT_EXAMPLE, "")):
        if not override.startswith("ARGS="):
            load_config(overrides=[override, "policy.max_position_embeddings=32768"])


def test_library_example_runs_as_printed():
    code = "\n".join(line[4:] for line in IMPORT_EXAMPLE.splitlines() if line.startswith("    "))
    names = {
        "policy_logprobs": torch.tensor([[-1.0, -1.0], [-1.0, -1.0]]),
        "rollout_logprobs": torch.tensor([[-1.0, -1.0], [-1.0, -2.0]]),
        "response_mask": torch.ones(2, 2, dtype=torch.bool),
    }
    exec(compile(code, "README.md", "exec"), names)
    assert names["keep"].tolist() == [True, False]  # log-ratio 1: k3 = e - 2 = 0.72


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_no_placeholder_is_left(document: Path):
    assert not re.findall(r"\b[A-Z]+_TABLE\b|TODO|TBD|FIXME", document.read_text())
