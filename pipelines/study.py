"""`trm-repro study`: several experiments, each a cell of arms, seeds and settings; goes on where it was.

Every cell is a `trm-repro reproduce` in a folder of its own under the study's. What each run did is written to CSV
files, from which ``--report`` draws figures and fills the tables of a document without the runs themselves.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from trm_repro.config import CONF_DIR
from trm_repro.errors import InputError
from trm_repro.parent_death import ending_with_this_process

HELP = "run the cells of a study, each a reproduce of its own, and collect what every run did"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("study", type=Path, nargs="?", default=CONF_DIR / "study.yaml", help="default: conf/study.yaml")
    parser.add_argument("--cells", nargs="+", default=[], metavar="CELL", help="only these cells")
    parser.add_argument("--out", type=Path, default=Path("runs/study"), help="folder of the cells; default: runs/study")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--collect", action="store_true", help="run nothing, only write what the runs there did")
    what.add_argument(
        "--report",
        type=Path,
        metavar="FOLDER",
        help="run nothing: from FOLDER's runs.csv and points.csv draw FOLDER/figures and fill the tables of --document",
    )
    parser.add_argument(
        "--document",
        type=Path,
        default=Path("docs/miniature.md"),
        help="with --report: Markdown whose marked tables are filled; default: docs/miniature.md",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    from pipelines.study_plan import cell_command, cell_runs, read_study
    from pipelines.study_results import collect

    cells = read_study(arguments.study)
    unknown = sorted(set(arguments.cells) - {cell.name for cell in cells})
    if unknown:
        raise InputError(f"{arguments.study} has no cell {unknown[0]!r}; it has {', '.join(c.name for c in cells)}")
    if arguments.report is not None:
        from pipelines.study_report import write_study_report

        sys.stdout.writelines(
            f"{file}\n" for file in write_study_report(arguments.report, arguments.document, cells=cells)
        )
        return 0
    chosen = [cell for cell in cells if not arguments.cells or cell.name in arguments.cells]
    for cell in chosen:
        list(cell_runs(cell, arguments.out))  # a wrong setting is named before anything is run
    if arguments.collect:
        written = collect(cells, arguments.out)
        if not written:
            raise InputError(f"{arguments.out}: holds no run of a cell of {arguments.study}; nothing is written")
        sys.stdout.writelines(f"{file}\n" for file in written)
        return 0
    failed, written = [], []
    for number, cell in enumerate(chosen, start=1):
        sys.stderr.write(f"cell {number} of {len(chosen)}: {cell.name}\n")
        command = cell_command(cell, arguments.out)
        if subprocess.run(command, check=False, preexec_fn=ending_with_this_process()).returncode:
            failed.append(cell.name)
        written = collect(cells, arguments.out)
    sys.stdout.writelines(f"{file}\n" for file in written)
    for name in failed:
        sys.stderr.write(f"trm-repro: cell {name} did not finish; the same command goes on with it\n")
    return 1 if failed else 0
