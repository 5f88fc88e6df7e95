"""The audit itself: files in, one payload of numbers out. Memory is that of a chunk and of the sums."""

import queue
import sys
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from pipelines.audit.acceptance import DEFAULT_ARMS, Arm, Counts, parse_arm
from pipelines.audit.advice import advise, bound_at, bounds_of, withheld, without_advice
from pipelines.audit.drift import Drift
from pipelines.audit.findings import SHIFT_TOKENS, Signatures
from pipelines.audit.gate_counts import GateCounts, default_gates
from pipelines.audit.loading import Reading, load_file
from pipelines.audit.own_shards import FileKind, kind_of
from pipelines.audit.slices import Slices
from pipelines.audit.statistics import (
    Chunk,
    FutureWeights,
    Sequences,
    Tokens,
    sequence_statistics,
    token_statistics,
)
from pipelines.audit.top_k import TopK
from pipelines.audit.wording import counted
from trm_repro import __version__
from trm_repro.errors import InputError
from trm_repro.gate_specs import GATE_SPECS

SCHEMA_VERSION = 1

MAX_PENDING = 3
"""Chunks that wait for the gates and slices, at most: the first ones take longer, while torch is imported."""

Payload = dict[str, Any]
T = TypeVar("T")
GateChoice = tuple[str, str, dict[str, float]]


@dataclass
class Request:
    """What to audit and how.

    Attributes:
        files: in order.
        chosen_format: a key of FORMATS, or None to find it file by file.
        mapped: column names by field, from --map.
        masks: our own mask files, or None to look beside the shards.
        skip_bad: whether bad rows are left out.
        arms: arms of the paper's gates, beside the default ones.
        gates: gates of the registry with thresholds, beside the default ones.
        is_quick: drift and the paper's gates alone, and signatures in the first tokens.
        length_limit: T of the bounds; None takes the longest response.
        shows_progress: whether to draw a bar on stderr.
    """

    files: list[Path]
    chosen_format: str | None = None
    mapped: dict[str, str] = field(default_factory=dict)
    masks: Path | None = None
    skip_bad: bool = False
    arms: list[Arm] = field(default_factory=list)
    gates: list[GateChoice] = field(default_factory=list)
    is_quick: bool = False
    length_limit: int | None = None
    shows_progress: bool = False


def audit(request: Request) -> Payload:
    """Measure rollouts.

    Args:
        request: what to read.

    Returns:
        The payload that --json writes; docs/audit.md describes it.

    Raises:
        InputError: for a file or row that cannot be used.
    """
    names = {arm.name: arm for arm in [*map(parse_arm, DEFAULT_ARMS), *request.arms]}
    spec = GATE_SPECS["ln_trm"].thresholds
    weights = FutureWeights(spec["ln_trm_epsilon"], spec["ln_trm_delta"])
    reading = Reading(skip_bad=request.skip_bad, is_quick=request.is_quick)
    drift, counts = Drift(is_quick=request.is_quick), Counts(list(names.values()))
    slices, signatures = Slices(), Signatures()
    top_k = TopK({name: arm.limits for name, arm in names.items() if not {"ln", "ser"} & set(arm.limits)})
    chosen = request.gates if request.is_quick else [*default_gates(), *request.gates]
    gates = list({gate[0]: gate for gate in chosen}.values())  # one named twice would be counted twice
    gate_counts = GateCounts(gates) if gates else None

    def add_by_torch(chunk: Chunk, tokens: Tokens, sequences: Sequences) -> None:
        if gate_counts is not None:
            gate_counts.add(chunk)
        if not request.is_quick:
            slices.add(chunk, tokens, sequences)

    with ThreadPoolExecutor(1) as pool:
        pending: deque[Future[None]] = deque()
        for chunk, tokens in _prefetched(_with_tokens(request, reading)):
            sequences = sequence_statistics(chunk, tokens, weights)
            if gates or not request.is_quick:
                pending.append(pool.submit(add_by_torch, chunk, tokens, sequences))
            drift.add(chunk, tokens, sequences)
            counts.add(sequences, chunk.step)
            if chunk.interval is not None:
                top_k.add(chunk.interval, chunk.offsets, sequences)
            if not request.is_quick or signatures.num_tokens < SHIFT_TOKENS:
                signatures.add(chunk, tokens)
            while len(pending) > MAX_PENDING:
                pending.popleft().result()
        for waiting in pending:
            waiting.result()
    payload = _payload(request, reading, drift, counts, slices, signatures, gate_counts)
    certified = top_k.summary()
    return payload if certified is None else payload | {"top_k": certified}


def _payload(
    request: Request,
    reading: Reading,
    drift: Drift,
    counts: Counts,
    slices: Slices,
    signatures: Signatures,
    gate_counts: GateCounts | None,
) -> Payload:
    num_lost, lost_tokens = reading.counts["nonfinite_sequences"], reading.counts["nonfinite_tokens"]
    if not drift.num_sequences + num_lost:
        raise InputError(
            f"no sequence could be used: {counted(reading.counts['rows'], 'row')}, "
            f"{reading.counts['bad_rows']:,} of them bad"
        )
    if not drift.num_sequences:
        raise InputError(
            f"all of {counted(num_lost, 'sequence')} hold a log-prob of -inf, so nothing can be measured; expected "
            "finite log-probs of the sampled tokens (cut by top-p or top-k? padding that no mask covers?)"
        )
    summary = drift.summary()
    length = request.length_limit or max(1, drift.longest)
    if length < drift.longest:
        raise InputError(f"--length-limit {length} is below the longest response, {drift.longest} tokens")
    findings = signatures.findings(summary, reading)
    num_empty = reading.counts["empty_sequences"]
    reason = withheld(drift.num_sequences + num_lost - num_empty, [finding.code for finding in findings])
    payload = {
        "schema_version": SCHEMA_VERSION,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": __version__,
        "files": [str(file) for file in request.files],
        "formats": dict(reading.formats),
        "columns": dict(sorted(reading.used.items())),
        "num_sequences": drift.num_sequences + num_lost,
        "num_tokens": drift.num_tokens + lost_tokens,
        "num_nonfinite_sequences": num_lost,
        "num_empty_sequences": num_empty,
        "num_bad_rows": reading.counts["bad_rows"],
        "bad_rows": reading.bad_rows,
        "estimator": "exact" if counts.is_exact else "sampled",
        **summary,
        "acceptance": counts.acceptance(num_lost),
        "sweep": {
            "trm_max": counts.sweep("max", num_lost),
            "trm_avg": counts.sweep("avg", num_lost),
            "ln_trm": counts.sweep("ln", num_lost),
            "ser": counts.sweep("ser", num_lost),
            "sequence_log_ratio": counts.sweep("sequence_log_ratio", num_lost),
            "geometric_log_ratio": counts.sweep("geometric_log_ratio", num_lost),
        },
        "rejected_by_length": counts.by_length(reading.nonfinite_lengths),
        "steps": [
            row
            | {"acceptance": counts.step_acceptance(row["step"], reading.nonfinite_steps[row["step"]])}
            | ({} if gate_counts is None else {"gates": gate_counts.step_fractions(row["step"], _lost_to_finite(row))})
            for row in drift.step_rows(reading.nonfinite_steps, reading.nonfinite_step_tokens)
        ],
        "advice": advise(counts, num_lost, length) if reason is None else without_advice(reason),
        "bound_if_threshold_held": {
            arm.name: bound_at(arm.limits["max"], length, arm.limits.get("avg"))
            for arm in counts.arms
            if "max" in arm.limits
        },
    }
    payload["findings"] = [finding.row() for finding in findings]
    payload["num_signature_tokens"] = signatures.num_tokens
    if gate_counts is not None:
        payload["gates"] = gate_counts.summary(drift.num_sequences, num_lost, lost_tokens)
        payload["gates_share_of_sequences"] = gate_counts.num_sequences / drift.num_sequences
    if not request.is_quick:
        payload["where"] = slices.summary()
        payload["bounds"] = bounds_of(summary, slices.kl_profile, drift.num_sequences, length)
    return payload


def _lost_to_finite(row: Payload) -> float:
    num_lost = row["num_nonfinite_sequences"]
    return float(num_lost / max(1, row["num_sequences"] - num_lost))


def _with_tokens(request: Request, reading: Reading) -> Iterator[tuple[Chunk, Tokens]]:
    for chunk in _chunks(request, reading):
        yield chunk, token_statistics(chunk)


def _chunks(request: Request, reading: Reading) -> Iterator[Chunk]:
    sizes = [file.stat().st_size for file in request.files]
    if all(kind_of(file) is FileKind.MASKS for file in request.files):
        raise InputError(f"{request.files[0]}: holds masks alone; give the rollout shards, their masks are found")
    if request.masks is not None and not any(kind_of(file) is FileKind.SHARD for file in request.files):
        raise InputError(
            f"--masks {request.masks}: does not apply, {request.files[0]} is no rollout shard of trm-repro; "
            "leave it out"
        )
    with _progress(sum(sizes), request.shows_progress) as bar:
        done = 0
        for file, size in zip(request.files, sizes, strict=True):
            chunks = load_file(file, reading, chosen=request.chosen_format, mapped=request.mapped, masks=request.masks)
            for chunk, fraction in chunks:
                yield chunk
                bar.update(done + int(size * fraction) - bar.n)
            done += size
            bar.update(done - bar.n)


def _progress(total: int, is_shown: bool) -> Any:  # noqa: ANN401
    from tqdm import tqdm

    return tqdm(
        total=total, unit="B", unit_scale=True, file=sys.stderr, disable=not is_shown, leave=False, desc="audit"
    )


def _prefetched(chunks: Iterator[T]) -> Iterator[T]:
    """Read one chunk ahead in a thread: decoding and arithmetic both leave the interpreter lock."""
    ahead: queue.Queue[T | BaseException | None] = queue.Queue(maxsize=1)
    is_over = threading.Event()

    def read() -> None:
        try:
            for chunk in chunks:
                while not is_over.is_set():
                    try:
                        ahead.put(chunk, timeout=1.0)
                        break
                    except queue.Full:
                        continue
                if is_over.is_set():
                    return
            ahead.put(None)
        except BaseException as error:  # handed to the thread that asked
            ahead.put(error)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    try:
        while (item := ahead.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        is_over.set()
