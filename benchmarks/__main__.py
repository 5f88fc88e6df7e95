"""Runs every script of benchmarks/ and collects one table: `make bench`, `make bench ARGS="--only NAME --quick"`.

Results go to runs/bench/ (with --quick to runs/bench/quick/): NAME.json of each script, and bench.json and bench.md of
all. A script that has finished with this code on this machine is not run again unless --again.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.measure import Row, goal_rows, machine, markdown_table
from pipelines.environment import ROOT
from pipelines.run_directory import write_atomically

FOLDER = Path("runs/bench")
CODE = ("benchmarks", "trm_repro", "pipelines", "evaluation", "conf", "requirements")
"""Folders on which a result depends."""
HERE = Path(__file__).parent


def scripts() -> dict[str, Path]:
    """Find the benchmarks: the modules of this folder that can be run."""
    found = sorted(path for path in HERE.glob("*.py") if path != Path(__file__))
    return {path.stem: path for path in found if '__name__ == "__main__"' in path.read_text(encoding="utf-8")}


def code_digest(root: Path = ROOT, folders: Iterable[str] = CODE) -> str:
    """Name the state of the code: the same files give the same digest, committed or not."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in (".py", ".yaml", ".txt", ".html", ".css", ".js"):
                digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def is_finished(path: Path, state: Row) -> bool:
    """Whether a result is there that was measured in this state of code, machine and versions."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(record, dict) and record.get("state") == state and "failed" not in record


def run_script(name: str, path: Path, *, quick: bool, state: Row) -> dict[str, Any]:
    """Run one benchmark in a process of its own.

    Args:
        name: its module.
        path: where its result goes, with when and on what it was measured.
        quick: ask for its small sizes.
        state: of the code, the machine and the versions.

    Returns:
        What was written to ``path``.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    raw = path.with_suffix(".partial")
    raw.unlink(missing_ok=True)
    begin = time.time()
    command = [sys.executable, "-m", f"benchmarks.{name}", "--json", str(raw.resolve()), *(["--quick"] * quick)]
    process = subprocess.run(command, cwd=ROOT)
    record: dict[str, Any] = {"benchmark": name, "rows": [], "goals": []}
    if process.returncode == 0 and raw.is_file():
        record |= json.loads(raw.read_text(encoding="utf-8"))
    else:
        record["failed"] = f"exit code {process.returncode}" if process.returncode else "it wrote no result"
    record |= {"state": state, "began": begin, "seconds": time.time() - begin, "commit": machine()["git_commit"]}
    write_atomically(path, json.dumps(record, indent=2) + "\n")
    raw.unlink(missing_ok=True)
    return record


def document(records: list[dict[str, Any]], facts: Row) -> str:
    """Write everything as one Markdown page."""
    goals = [
        {"benchmark": record["benchmark"], **row} for record in records for row in goal_rows(record.get("goals", []))
    ]
    parts = ["# Benchmarks", ", ".join(f"{name} {value}" for name, value in facts.items())]
    parts += ["## Goals", markdown_table(goals)] if goals else []
    for record in records:
        parts.append(f"## {record['benchmark']}")
        when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(record["began"]))
        parts.append(f"{when}, commit {record['commit']}, {record['seconds']:.0f} s")
        parts += record.get("notes", [])
        parts += [f"failed: {record['failed']}"] if "failed" in record else []
        parts += [f"not measured: {record['skipped']}"] if "skipped" in record else []
        parts += [markdown_table(record["rows"])] if record.get("rows") else []
    return "\n\n".join(parts) + "\n"


def _record(path: Path) -> dict[str, Any]:
    """Read a result; ValueError where the file holds something else."""
    record = json.loads(path.read_text(encoding="utf-8"))
    wanted = {"benchmark", "rows", "goals", "began", "seconds", "commit"}
    if not isinstance(record, dict) or not wanted <= set(record):
        raise ValueError(f"expected an object with {', '.join(sorted(wanted))}")
    return record


def collect(folder: Path, facts: Row) -> list[dict[str, Any]]:
    """Put the results that are there into bench.json and bench.md."""
    paths = [folder / f"{name}.json" for name in scripts()]
    records = []
    for path in filter(Path.is_file, paths):
        try:
            records.append(_record(path))
        except ValueError as error:
            print(f"{path}: left out, is no result ({error}); run it again", file=sys.stderr)
    write_atomically(folder / "bench.json", json.dumps({"machine": facts, "benchmarks": records}, indent=2) + "\n")
    write_atomically(folder / "bench.md", document(records, facts))
    return records


def main(argv: list[str] | None = None) -> int:
    """Run what was asked for; 1 when a script failed. A goal that is not met fails nothing."""
    parser = argparse.ArgumentParser(
        prog="make bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=scripts(), metavar="NAME", help=f"of {', '.join(scripts())}")
    parser.add_argument("--quick", action="store_true", help="small sizes, about a minute each; not for comparison")
    parser.add_argument("--again", action="store_true", help="also what has finished with this code")
    parser.add_argument("--out", type=Path, default=FOLDER, help=f"folder of the results; default {FOLDER}")
    arguments = parser.parse_args(argv)
    folder = arguments.out / "quick" if arguments.quick else arguments.out
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out {folder}: {error.strerror}; expected a folder that can be written to")
    facts = machine()
    state = {"code": code_digest(), **{name: value for name, value in facts.items() if name != "git_commit"}}
    failed = []
    for name in arguments.only or scripts():
        path = folder / f"{name}.json"
        if not arguments.again and is_finished(path, state):
            print(f"## {name}: finished with this code; --again measures it again\n", flush=True)
            continue
        print(f"## {name}\n", flush=True)
        record = run_script(name, path, quick=arguments.quick, state=state)
        print(f"\n{name}: {record.get('failed', 'done')} after {record['seconds']:.0f} s\n", flush=True)
        failed += [name] * ("failed" in record)
        collect(folder, facts)
    records = collect(folder, facts)
    missed = [found for record in records for found in record["goals"] if not found["met"]]
    print(f"{folder / 'bench.md'}: {len(records)} benchmarks, {len(missed)} goals not met, {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
