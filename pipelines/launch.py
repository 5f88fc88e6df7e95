"""Training by one process or several: starting the ranks of this machine, and what each of them does.

Several ranks are started by torch's elastic launcher, the library behind torchrun. Where torchrun or SLURM has started
the command once per rank already, as on several machines, each process is its rank.
"""

import logging
import multiprocessing
import os
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from trm_repro.config import RunConfig
from trm_repro.errors import FaultError, InputError

if TYPE_CHECKING:
    from trm_repro.steps import ReferenceUpdate

LONGEST_WAIT = timedelta(hours=6)
"""How long ranks wait for one another: the first one samples and grades alone where the engine is its own."""


def launched_rank() -> int | None:
    """Return this process's rank where a launcher has started it as one of several, else None."""
    return int(os.environ["RANK"]) if "RANK" in os.environ and "WORLD_SIZE" in os.environ else None


def train_ranks(
    config: RunConfig,
    model_path: Path,
    reference: "Mapping[int, Sequence[ReferenceUpdate]] | None" = None,
    *,
    show_progress: bool = False,
) -> None:
    """Train a run whose policy is sharded, with as many processes as trainer.devices says.

    Args:
        config: the run; its folder has been prepared.
        model_path: directory or hub name of the starting policy.
        reference: for a control: what the arm that it copies did.
        show_progress: draw a progress bar.

    Raises:
        InputError: if a rank stopped for a reason that the user can mend.
        FaultError: if a rank stopped for another one.
    """
    if launched_rank() is not None:
        check_launch(config)
        rank_main(config, model_path, reference, show_progress)
        return
    if config.trainer.num_nodes > 1:
        raise InputError(
            f"trainer.num_nodes={config.trainer.num_nodes}: start this command on every machine by torchrun "
            f"--nnodes={config.trainer.num_nodes} --nproc-per-node={config.trainer.devices}; docs/scaling.md shows how"
        )
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    launch = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=config.trainer.devices,
        run_id=f"{config.arm}_{config.seed}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.2,
        start_method="spawn",
    )
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # a failure is told in one line
    try:
        elastic_launch(launch, rank_main)(config, model_path, reference, show_progress)
    except ChildFailedError as error:
        rank, first = error.get_first_failure()
        message, stack = first.message, ""
        if isinstance(message, dict):
            message, stack = message["message"], message.get("extraInfo", {}).get("py_callstack", "")
        kind, _, text = str(message).partition(": ")
        if kind == "InputError":
            raise InputError(text) from None
        if kind != "FaultError":
            sys.stderr.write(stack)  # what nobody foresaw
        reason = text if kind == "FaultError" else (str(message).strip().splitlines() or ["no message"])[-1][:300]
        raise FaultError(f"rank {rank} of {config.arm}/seed_{config.seed}: {reason}") from None


def check_launch(config: RunConfig) -> None:
    """Check that the launcher started as many ranks as the configuration says.

    Raises:
        InputError: if not.
    """
    started = int(os.environ["WORLD_SIZE"])
    if started != config.trainer.num_ranks:
        raise InputError(
            f"{started} processes were started, but trainer.num_nodes * trainer.devices = {config.trainer.num_ranks}; "
            "make the two equal"
        )


def rank_main(
    config: RunConfig,
    model_path: Path,
    reference: "Mapping[int, Sequence[ReferenceUpdate]] | None",
    show_progress: bool,
) -> None:
    """Be one rank of a run, to its end; an error is left where the launcher finds it."""
    from torch.distributed.elastic.multiprocessing.errors import record

    record(_train_rank)(config, model_path, reference, show_progress)


def _train_rank(
    config: RunConfig,
    model_path: Path,
    reference: "Mapping[int, Sequence[ReferenceUpdate]] | None",
    show_progress: bool,
) -> None:
    import torch
    import torch.distributed as dist

    from pipelines.session import open_session, set_threads
    from pipelines.training import train_run
    from pipelines.worker import die_with_parent
    from trm_repro import ranks

    if multiprocessing.parent_process() is not None:
        die_with_parent()
    set_threads(config.num_threads)
    if config.trainer.accelerator == "gpu":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # Lightning and vLLM take the group that is there; numbers and objects travel by gloo, gradients by nccl.
    backend = "cpu:gloo,cuda:nccl" if config.trainer.accelerator == "gpu" else "gloo"
    dist.init_process_group(backend, timeout=LONGEST_WAIT)
    session = open_session(config, model_path)
    train_run(config, session, model_path, reference, show_progress=show_progress and ranks.is_first())
    dist.barrier()
    dist.destroy_process_group()
