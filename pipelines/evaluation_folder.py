"""The files of one evaluation: its settings, every answer as its problem is done, grades and scores.

settings.json                 what the answers depend on; another run with other settings is refused
generations/PROBLEM.parquet   all answers to one problem, written when the problem is done
answers.parquet               the answers with their grades
scores.json                   the scores; docs/evaluation.md says what each field is
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pyarrow as pa

from evaluation.generations import Generation, generation_file, read_generations
from evaluation.scores import ScoredResponse
from pipelines.run_directory import differences, write_atomically
from trm_repro.errors import InputError
from trm_repro.file_locks import file_lock
from trm_repro.parquet_files import check_folder, write_table
from trm_repro.tasks import GradingMode, Problem

Settings = Mapping[str, Any]
BLOCK_BYTES = 1 << 16
NUM_BLOCKS = 64  # of a weight file that are hashed; training moves every weight, so any few tell two models apart
NOT_A_FOLDER = "expected a folder that `trm-repro evaluate --out` wrote"


class EvaluationFolder:
    """Reads and writes one evaluation's files."""

    def __init__(self, path: Path) -> None:
        """Name the files; nothing is written yet."""
        self.path = path
        self.settings_file = path / "settings.json"
        self.generations = path / "generations"
        self.greedy = path / "greedy"

    def locked(self) -> AbstractContextManager[None]:
        """Hold the folder for this process; a second process gets an InputError."""
        check_folder(self.path)
        return file_lock(self.path / "lock", busy="another process is evaluating into it; wait for it or stop it")

    def prepare(self, settings: Settings, about: Settings) -> None:
        """Write the settings, or check that the answers there were sampled by the same.

        Args:
            settings: what the answers depend on.
            about: what is worth knowing beside it, and not compared.

        Raises:
            InputError: if the folder's answers were sampled by other settings.
        """
        if self.settings_file.is_file():
            there = self.read_settings()
            different = list(differences({**dict.fromkeys(settings), **there}, dict(settings)))
            if different:
                raise InputError(
                    f"{self.path} holds answers by other settings ({'; '.join(different[:3])}); choose another --out, "
                    "or delete that folder"
                )
        text = json.dumps({**settings, "about": about}, indent=2, ensure_ascii=False)
        write_atomically(self.settings_file, f"{text}\n")

    def read_settings(self) -> dict[str, Any]:
        """Read the settings the answers were sampled by.

        Raises:
            InputError: if there are none that can be read.
        """
        try:
            settings = json.loads(self.settings_file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise InputError(f"{self.settings_file}: no such file; {NOT_A_FOLDER}") from None
        except (ValueError, RecursionError):
            settings = None
        if not isinstance(settings, dict):
            raise InputError(f"{self.settings_file}: is not a JSON object; {NOT_A_FOLDER}")
        return settings

    def answers_to(self, place: Path, problem: Problem, num_samples: int) -> list[Generation] | None:
        """Read the answers to a problem.

        Args:
            place: ``generations`` or ``greedy``.
            problem: with its rendered prompt.
            num_samples: how many answers there must be.

        Returns:
            The answers, or None where the problem has not been done.

        Raises:
            InputError: if the file is damaged, or answers another question.
        """
        path = generation_file(place, problem.id)
        if not path.is_file():
            return None
        found = read_generations(path)
        asked = {(problem.id, problem.prompt, problem.answer)}
        if {(one.problem_id, one.prompt, one.gold) for one in found} != asked or len(found) != num_samples:
            raise InputError(
                f"{path}: answers another question than problem {problem.id} now asks, or not {num_samples} times; "
                "choose another --out, or delete that folder"
            )
        return found

    def all_answers(self, place: Path) -> list[Generation]:
        """Read every finished problem's answers, in the order of the files' names."""
        return [answer for path in sorted(place.glob("*.parquet")) for answer in read_generations(path)]

    def write_scores(
        self, scores: Mapping[str, object], scored: Sequence[ScoredResponse], grading: GradingMode, folder: Path
    ) -> Path:
        """Write grades and scores; those of the strict rule and of verl's have files of their own.

        Returns:
            The file of the scores.
        """
        suffix = "" if grading == "strict" else f"_{grading}"
        check_folder(folder)
        write_table(
            folder / f"answers{suffix}.parquet",
            pa.Table.from_pylist([dataclasses.asdict(answer) for answer in scored]),
        )
        path = folder / f"scores{suffix}.json"
        write_atomically(path, json.dumps(scores, indent=2, ensure_ascii=False) + "\n")
        return path


def policy_fingerprint(policy: Path) -> str:
    """Hash what a policy's answers depend on: configuration, tokenizer, and blocks all over its weights.

    Args:
        policy: a directory, or a hub name.

    Returns:
        12 hexadecimal digits; of a hub name, the name itself.
    """
    if not policy.is_dir():
        return str(policy)
    digest = hashlib.sha256()
    for file in sorted(policy.iterdir()):
        if file.suffix not in (".json", ".jinja", ".safetensors", ".txt", ".model"):
            continue
        size = file.stat().st_size
        digest.update(f"{file.name}:{size};".encode())
        with file.open("rb") as content:
            if size <= NUM_BLOCKS * BLOCK_BYTES:
                digest.update(content.read())
                continue
            for block in range(NUM_BLOCKS):
                content.seek(block * (size - BLOCK_BYTES) // (NUM_BLOCKS - 1))
                digest.update(content.read(BLOCK_BYTES))
    return digest.hexdigest()[:12]
