"""Log-probs, gradients and exact divergence over a large vocabulary: time and memory of every form.

The naive form makes the logits of all tokens at once; so do TRL's and verl's own functions, given logits. Memory is
resident size beyond what was there before the call: its peak, and the peak of what is neither an input nor, from when
it exists, a gradient. The naive form peaks twice: before the head's gradient exists, with three tables of logits, and
after, with one. Every repetition runs all forms in turn, so that a busy moment meets all.

    .venv/bin/python -m benchmarks.vocabulary --sizes 512x4096 --repeats 5
"""

import argparse
import ctypes
import gc
import statistics
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.measure import add_report_arguments, goal, publish, reset_peak, resident
from trm_repro.divergence import exact_kl_divergence, exact_total_variation
from trm_repro.vocab import HiddenRollout, token_logprobs, token_statistics

SIZES = ("128x4096", "512x4096", "4096x1024")
"""Tokens x hidden size; the largest table of logits is 2.3 GiB."""

VOCAB = 151_936
LIBC = ctypes.CDLL(None)
M_MMAP_THRESHOLD = -3  # of glibc's mallopt
PEERS = Path("runs/bench/peers/verl")
VERL = ("verl==0.9.1", "tensordict==0.15.3", "pyvers==0.2.2", "cloudpickle==3.1.2")


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
        self.normalizers = token_statistics(self.hidden, self.head, self.token_ids).normalizers
        self.early_peak = 0

    def note_peak(self, _: Tensor) -> None:
        """Remember the peak so far, while there is no gradient of an input yet."""
        self.early_peak = resident("VmHWM")

    def backward(self, logprobs: Tensor) -> None:
        """Weight advantages by importance ratios, as the surrogate does, and go backward."""
        (self.advantages * torch.exp(logprobs - self.rollout_logprobs)).sum().backward()

    def logits(self) -> Tensor:
        """Make the logits of all tokens."""
        logits = torch.nn.functional.linear(self.hidden, self.head)
        if logits.requires_grad:
            logits.register_hook(self.note_peak)  # called with the gradient of the logits, before those of the inputs
        return logits

    def naive(self) -> None:
        """Forward and backward through a log-softmax of all logits."""
        logprobs = torch.log_softmax(self.logits().float(), dim=-1)
        self.backward(logprobs.gather(-1, self.token_ids[:, None])[:, 0])

    def trl(self) -> None:
        """TRL's function on all logits."""
        from trl.trainer.utils import selective_log_softmax

        self.backward(selective_log_softmax(self.logits(), self.token_ids))

    def verl(self) -> None:
        """Verl's function on all logits."""
        from verl.utils.torch_functional import logprobs_from_logits

        self.backward(logprobs_from_logits(self.logits(), self.token_ids))

    def given(self) -> None:
        """Ours, with the normalizers that the divergence pass has found."""
        self.backward(token_logprobs(self.hidden, self.head, self.token_ids, normalizers=self.normalizers))

    def computed(self) -> None:
        """Ours, with normalizers computed in the forward pass."""
        self.backward(token_logprobs(self.hidden, self.head, self.token_ids))

    @torch.no_grad()
    def products(self) -> None:
        """The three matrix products alone, of all tokens at once."""
        logits = self.hidden @ self.head.t()
        self.hidden.grad, self.head.grad = logits @ self.head, logits.t() @ self.hidden

    @torch.no_grad()
    def naive_divergence(self) -> None:
        """Entropy, KL and TV from two whole tables of log-probs."""
        policy = torch.log_softmax(self.logits().float(), dim=-1)
        rollout_logits = torch.nn.functional.linear(self.rollout.hidden, self.rollout.heads[0]).float()
        rollout = torch.log_softmax(rollout_logits, dim=-1)
        del rollout_logits
        exact_kl_divergence(rollout, policy)
        exact_total_variation(rollout, policy)
        torch.special.entr(policy.exp()).sum(dim=-1)

    def divergence(self) -> None:
        """The same, rebuilt by chunks from hidden states."""
        token_statistics(self.hidden, self.head, self.token_ids, rollout=self.rollout)

    @torch.no_grad()
    def naive_scoring(self) -> None:
        """Log-prob and entropy from one whole table."""
        logprobs = torch.log_softmax(self.logits().float(), dim=-1)
        logprobs.gather(-1, self.token_ids[:, None])
        torch.special.entr(logprobs.exp()).sum(dim=-1)

    @torch.no_grad()
    def trl_scoring(self) -> None:
        """TRL's functions on all logits."""
        from trl.trainer.utils import entropy_from_logits, selective_log_softmax

        logits = self.logits()
        selective_log_softmax(logits, self.token_ids)
        entropy_from_logits(logits)

    @torch.no_grad()
    def verl_scoring(self) -> None:
        """Verl's functions on all logits."""
        from verl.utils.torch_functional import entropy_from_logits_with_chunking, logprobs_from_logits

        logits = self.logits()
        logprobs_from_logits(logits, self.token_ids)
        entropy_from_logits_with_chunking(logits)

    def scoring(self) -> None:
        """Ours."""
        token_statistics(self.hidden, self.head, self.token_ids)


GROUPS = {
    "forward and backward": ("naive", "trl", "verl", "given", "computed", "products"),
    "log-prob and entropy": ("naive_scoring", "trl_scoring", "verl_scoring", "scoring"),
    "entropy, KL and TV": ("naive_divergence", "divergence"),
}


def install_verl() -> str | None:
    """Put verl beside the environment, without its dependencies; return why not, if so."""
    if not (PEERS / "verl").is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(PEERS), *VERL]
        if subprocess.run(command, check=False).returncode:
            return f"{VERL[0]} could not be installed"
    sys.path.append(str(PEERS))
    package = types.ModuleType("verl")  # in place of its __init__, which imports ray
    package.__path__ = [str(PEERS / "verl")]
    sys.modules["verl"] = package
    try:
        from verl.utils import torch_functional  # noqa: F401
    except ImportError as error:
        return f"{VERL[0]} cannot be imported ({error})"
    return None


def run_once(case: Case, name: str) -> dict[str, float]:
    """Run one form; return its wall seconds and its memory beyond inputs, bytes."""
    case.hidden.grad = case.head.grad = None
    case.early_peak = 0
    form: Callable[[], None] = getattr(case, name)
    gc.collect()
    LIBC.malloc_trim(0)  # what the last form freed is otherwise resident still, and this one's to use
    reset_peak()
    before = resident("VmRSS")
    start = time.perf_counter()
    form()
    seconds = time.perf_counter() - start
    gradients = [tensor.grad for tensor in (case.hidden, case.head) if tensor.grad is not None]
    peak = resident("VmHWM") - before
    memory = max(peak - sum(gradient.nbytes for gradient in gradients), case.early_peak - before)
    return {"seconds": seconds, "memory": float(memory)}


def measure(case: Case, names: list[str], repeats: int, label: str) -> dict[str, dict[str, float]]:
    """Run every form in turn, once to warm up and then ``repeats`` times: median seconds and the largest memory."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in tqdm(range(repeats + 1), desc=label):
        for name in names:
            runs[name].append(run_once(case, name))
    return {
        name: {
            "seconds": statistics.median(run["seconds"] for run in kept[1:]),
            "memory": max(run["memory"] for run in kept[1:]),
        }
        for name, kept in runs.items()
    }


def main() -> int:
    """Measure and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", metavar="TOKENSxHIDDEN", help=f"default: {' '.join(SIZES)}")
    parser.add_argument("--vocab-size", type=int, default=VOCAB)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the policy's tensors")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--forms", nargs="+", help="default: all", default=None)
    add_report_arguments(parser)
    arguments = parser.parse_args()
    sizes = [
        tuple(map(int, size.split("x"))) for size in arguments.sizes or (["128x256"] if arguments.quick else SIZES)
    ]
    torch.set_num_threads(arguments.threads)
    LIBC.mallopt(M_MMAP_THRESHOLD, 2**20)  # freed blocks from 1 MiB on go back at once, so that they count
    notes = [
        f"V = {arguments.vocab_size}, {arguments.dtype}, {arguments.threads} threads, medians of "
        f"{arguments.repeats} after one to warm up. given: with the normalizers of the divergence pass; computed: "
        "without; products: the three matrix products alone. Ratios are to the naive form."
    ]
    missing = install_verl()
    notes += [f"Without verl: {missing}."] if missing else []
    rows: list[dict[str, object]] = []
    goals = []
    for num_tokens, hidden_size in sizes:
        case = Case(num_tokens, hidden_size, arguments.vocab_size, getattr(torch, arguments.dtype))
        for group in arguments.groups:
            forms = [name for name in GROUPS[group] if not (missing and name.startswith("verl"))]
            names = [name for name in forms if arguments.forms is None or name in arguments.forms]
            if not names:
                continue
            found = measure(case, names, arguments.repeats, f"{num_tokens} x {hidden_size}, {group}")
            naive = found[names[0]]
            rows += [
                {
                    "tokens": num_tokens,
                    "hidden": hidden_size,
                    "what": group,
                    "form": name,
                    "seconds": values["seconds"],
                    "time ratio": values["seconds"] / naive["seconds"],
                    "MiB beyond inputs and gradients": values["memory"] / 2**20,
                    "memory ratio": values["memory"] / naive["memory"],
                }
                for name, values in found.items()
            ]
            if {"naive", "given"} <= set(found):
                size = f"{num_tokens} x {hidden_size} x {arguments.vocab_size}, given the mask"
                time_ratio = found["given"]["seconds"] / naive["seconds"]
                goals.append(goal(f"time to the naive form, {size}", time_ratio, 1.2, "at_most"))
                memory_ratio = found["given"]["memory"] / naive["memory"]
                goals.append(goal(f"memory to the naive form, {size}", memory_ratio, 0.1, "at_most"))
        del case
    publish("vocabulary", rows, goals, arguments.json, notes=notes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
