"""Log-probs, gradients and exact divergence over a large vocabulary: time and memory against the naive form.

The naive form makes the logits of all tokens at once. Memory is resident size beyond what was there before the call:
its peak, and the peak of what is neither an input nor, from when it exists, a gradient. The naive form peaks twice:
before the head's gradient exists, with three tables of logits, and after, with one. Every repetition runs all forms in
turn, so that a busy moment meets all.

    make bench
    .venv/bin/python benchmarks/vocabulary.py --tokens 512 --repeats 5
"""

import argparse
import ctypes
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from pipelines.environment import git_commit
from trm_repro.divergence import exact_kl_divergence, exact_total_variation
from trm_repro.vocab import HiddenRollout, token_logprobs, token_objective, token_statistics

HIDDEN, VOCAB = 4096, 151_936
FOLDER = Path("runs/benchmarks")
M_MMAP_THRESHOLD = -3  # of glibc's mallopt


class Case:
    """Inputs of one size, and the forms that are compared on them."""

    def __init__(self, num_tokens: int, hidden_size: int, vocab_size: int, dtype: torch.dtype) -> None:
        """Draw the inputs; the rollout policy's head is bfloat16, as an engine's."""
        generator = torch.Generator().manual_seed(0)
        self.hidden = torch.empty(num_tokens, hidden_size, dtype=dtype).normal_(generator=generator).requires_grad_()
        self.head = torch.empty(vocab_size, hidden_size, dtype=dtype).normal_(0, 0.02, generator=generator)
        self.head.requires_grad_()
        self.token_ids = torch.randint(vocab_size, (num_tokens,), generator=generator)
        self.advantages = torch.randn(num_tokens, generator=generator)
        self.rollout_logprobs = torch.full((num_tokens,), -12.0)
        rollout_hidden = self.hidden.detach() + 0.01 * torch.randn(num_tokens, hidden_size, generator=generator)
        self.rollout = HiddenRollout(
            hidden=rollout_hidden.bfloat16(),
            versions=torch.zeros(num_tokens, dtype=torch.int64),
            heads={0: self.head.detach().bfloat16()},
        )

        self.early_peak = 0

    def note_peak(self, _: Tensor) -> None:
        """Remember the peak so far, while there is no gradient of an input yet."""
        self.early_peak = resident("VmHWM")

    def objective(self, logprobs: Tensor, tokens: slice) -> Tensor:
        """Weight advantages by importance ratios, as the surrogate does."""
        return self.advantages[tokens] * torch.exp(logprobs - self.rollout_logprobs[tokens])

    def naive(self) -> None:
        """Forward and backward through a log-softmax of all logits."""
        logits = torch.nn.functional.linear(self.hidden, self.head).float()
        logits.register_hook(self.note_peak)  # called with the gradient of the logits, before those of the inputs
        logprobs = torch.log_softmax(logits, dim=-1).gather(-1, self.token_ids[:, None])[:, 0]
        del logits
        self.objective(logprobs, slice(None)).sum().backward()

    def chunked(self) -> None:
        """Forward and backward with gradients formed in the forward pass."""
        total, _ = token_objective(self.hidden, self.head, self.token_ids, self.objective)
        total.backward()

    def recomputed(self) -> None:
        """Forward and backward for any upstream gradient: logits once more in the backward pass."""
        logprobs = token_logprobs(self.hidden, self.head, self.token_ids)
        self.objective(logprobs, slice(None)).sum().backward()

    @torch.no_grad()
    def products(self) -> None:
        """The three matrix products alone, of all tokens at once."""
        logits = self.hidden @ self.head.t()
        self.hidden.grad, self.head.grad = logits @ self.head, logits.t() @ self.hidden

    @torch.no_grad()
    def naive_divergence(self) -> None:
        """Entropy, KL and TV from two whole tables of log-probs."""
        policy = torch.log_softmax(torch.nn.functional.linear(self.hidden, self.head).float(), dim=-1)
        rollout_logits = torch.nn.functional.linear(self.rollout.hidden, self.rollout.heads[0]).float()
        rollout = torch.log_softmax(rollout_logits, dim=-1)
        del rollout_logits
        exact_kl_divergence(rollout, policy)
        exact_total_variation(rollout, policy)
        torch.special.entr(policy.exp()).sum(dim=-1)

    def divergence(self) -> None:
        """The same, rebuilt by chunks from hidden states."""
        token_statistics(self.hidden, self.head, self.token_ids, rollout=self.rollout)


UPDATE = ("naive", "chunked", "recomputed", "products")
DIVERGENCE = ("naive_divergence", "divergence")


def resident(field: str) -> int:
    """Read VmRSS (now) or VmHWM (largest since the last reset) of this process, bytes."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(status.split(f"{field}:")[1].split()[0])


def run_once(case: Case, name: str) -> dict[str, float]:
    """Run one form; return its wall and CPU seconds and its memory beyond inputs, bytes."""
    case.hidden.grad = case.head.grad = None
    case.early_peak = 0
    form: Callable[[], None] = getattr(case, name)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets VmHWM
    before = resident("VmRSS")
    wall, cpu = time.perf_counter(), time.process_time()
    form()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    gradients = [tensor.grad for tensor in (case.hidden, case.head) if tensor.grad is not None]
    peak = resident("VmHWM") - before
    memory = max(peak - sum(gradient.nbytes for gradient in gradients), case.early_peak - before)
    return {"wall": wall, "cpu": cpu, "memory": float(memory), "peak": float(peak)}


def measure(case: Case, names: tuple[str, ...], repeats: int) -> dict[str, dict[str, float]]:
    """Run every form in turn, once to warm up and then ``repeats`` times; return medians, and the largest memory."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in tqdm(range(repeats + 1), desc=f"{case.hidden.shape[0]} tokens, {names[-1]}"):
        for name in names:
            runs[name].append(run_once(case, name))
    summary = {}
    for name, kept in ((name, runs[name][1:]) for name in names):
        summary[name] = {key: statistics.median(run[key] for run in kept) for key in ("wall", "cpu")}
        summary[name] |= {key: max(run[key] for run in kept) for key in ("memory", "peak")}
    return summary


def processor() -> str:
    """Read the processor's name."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "unknown processor")


def rows(num_tokens: int, summary: dict[str, dict[str, float]]) -> list[str]:
    """Write one line per form, ratios to the first."""
    first = summary[next(iter(summary))]
    return [
        f"| {num_tokens} | {name} | {values['wall']:.2f} | {values['wall'] / first['wall']:.2f} | "
        f"{values['cpu'] / first['cpu']:.2f} | {values['memory'] / 2**20:.0f} | "
        f"{values['memory'] / first['memory']:.3f} | {values['peak'] / 2**20:.0f} |"
        for name, values in summary.items()
    ]


def main() -> int:
    """Measure and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--hidden-size", type=int, default=HIDDEN)
    parser.add_argument("--vocab-size", type=int, default=VOCAB)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the policy's tensors")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--forms", nargs="+", choices=[*UPDATE, *DIVERGENCE], default=[*UPDATE, *DIVERGENCE])
    parser.add_argument("--out", type=Path, default=FOLDER)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**20)  # freed blocks from 1 MiB on go back at once, so that they count
    lines = [
        f"H = {arguments.hidden_size}, V = {arguments.vocab_size}, {arguments.dtype}, {arguments.threads} threads, "
        f"medians of {arguments.repeats}, torch {torch.__version__}, "
        f"{processor()}, commit {git_commit()}",
        "",
        "| tokens | form | seconds | time ratio | CPU ratio | MiB beyond inputs and gradients | ratio | MiB at peak |",
        "|---|---|---|---|---|---|---|---|",
    ]
    results: dict[str, dict[str, dict[str, float]]] = {}
    for num_tokens in arguments.tokens:
        case = Case(num_tokens, arguments.hidden_size, arguments.vocab_size, getattr(torch, arguments.dtype))
        for group in (UPDATE, DIVERGENCE):
            names = tuple(name for name in group if name in arguments.forms)
            if names:
                summary = measure(case, names, arguments.repeats)
                results.setdefault(str(num_tokens), {}).update(summary)
                lines += rows(num_tokens, summary)
        del case
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "vocabulary.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    (arguments.out / "vocabulary.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
