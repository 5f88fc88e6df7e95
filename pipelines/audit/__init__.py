"""`trm-repro audit PATH ...`: measure the mismatch in anybody's rollout dump, without vLLM and without a GPU.

Files flow one way: sources (bytes to columns), adapters (whose names), checks and loading (checked chunks), statistics
and drift (numbers), acceptance, gate_counts, top_k, slices, findings and advice, then wording, output, terminal, page.
"""

import argparse
import sys
from pathlib import Path

HELP = "measure the mismatch in a dump of rollouts of any trainer, and what each gate would keep of it"

FORMAT_NAMES = ("generic", "verl", "trl", "prime-rl", "slime", "skyrl", "nemo-rl", "areal", "openrlhf")
"""Keys of `adapters.FORMATS`, which a test holds equal; here so that --help needs no numpy."""

MAX_LENGTH = 10**9
"""Tokens of a response, at most, in --length-limit."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "paths",
        nargs="+",
        metavar="PATH",
        help="files, folders or globs: .jsonl .parquet .arrow .feather .npz .safetensors .pt",
    )
    parser.add_argument("--format", choices=FORMAT_NAMES, help="whose field names they are; found if not given")
    parser.add_argument(
        "--map",
        action="append",
        default=[],
        metavar="OURS=THEIRS",
        help="column of a field, such as policy_logprobs=my_logp; repeat for more",
    )
    parser.add_argument("--masks", type=Path, metavar="PATH", help="mask files of our own shards; found beside them")
    parser.add_argument(
        "--arms",
        nargs="+",
        default=[],
        metavar="ARM",
        help="further thresholds of the paper's gates, such as trm_max_0.02 trm_max_0.2_avg_0.003",
    )
    parser.add_argument(
        "--gates",
        nargs="+",
        default=[],
        metavar="GATE[:NAME=VALUE,...]",
        help="further gates with thresholds, such as sequence_mis:low=0,high=3",
    )
    parser.add_argument(
        "--thresholds",
        nargs="+",
        action="extend",
        default=[],
        metavar="GATE=VALUE[,VALUE...]",
        help="values for trm_max, trm_avg, ln_trm or ser, such as trm_max=0.02,0.2 ser=0.1",
    )
    parser.add_argument("--length-limit", type=int, metavar="T", help="T of the bounds; default the longest response")
    parser.add_argument("--skip-bad", action="store_true", help="leave bad rows out and count them")
    parser.add_argument(
        "--quick", action="store_true", help="drift and the paper's gates; signatures in the first tokens alone"
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write every number as JSON")
    parser.add_argument("--html", type=Path, metavar="OUT", help="write a self-contained page")
    parser.add_argument("--mlflow", metavar="URI", help="record the audit as a run of the MLflow at URI")
    parser.add_argument("--experiment", default="trm-audit", help="MLflow experiment; default trm-audit")


def run(arguments: argparse.Namespace) -> int:
    """Audit and print.

    Args:
        arguments: as parsed with `configure`.

    Returns:
        0.

    Raises:
        InputError: for a file, row, column or option that cannot be used.
    """
    from pipelines.audit.acceptance import parse_arm, parse_gate, parse_thresholds
    from pipelines.audit.adapters import parse_map
    from pipelines.audit.measure import Request, audit
    from pipelines.audit.output import check_outputs, printable, write_outputs
    from pipelines.audit.own_shards import find_dumps
    from pipelines.audit.terminal import summary_text
    from trm_repro.errors import InputError

    if arguments.length_limit is not None and not 1 <= arguments.length_limit <= MAX_LENGTH:
        raise InputError(f"--length-limit must be 1 to {MAX_LENGTH:,}, got {str(arguments.length_limit)[:20]}")
    files = find_dumps(arguments.paths)
    masks = [] if arguments.masks is None else [arguments.masks]
    check_outputs(arguments.json, arguments.html, inputs=[*files, *masks])
    request = Request(
        files=files,
        chosen_format=arguments.format,
        mapped=parse_map(arguments.map),
        masks=arguments.masks,
        skip_bad=arguments.skip_bad,
        arms=[*map(parse_arm, arguments.arms), *parse_thresholds(arguments.thresholds)],
        gates=[parse_gate(text) for text in arguments.gates],
        is_quick=arguments.quick,
        length_limit=arguments.length_limit,
        shows_progress=sys.stderr.isatty(),
    )
    payload = printable(audit(request))
    written = write_outputs(payload, json_path=arguments.json, html_path=arguments.html)
    sys.stdout.write(summary_text(payload))
    sys.stdout.writelines(f"wrote {path}\n" for path in written)
    if arguments.mlflow is not None:
        from pipelines.tracking.audit import log_audit

        log_audit(
            payload, uri=arguments.mlflow, experiment=arguments.experiment, files=[arguments.json, arguments.html]
        )
    return 0
