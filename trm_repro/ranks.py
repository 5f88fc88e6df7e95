"""The processes that train together: who this one is, and small collectives that do nothing for one process.

Numbers and Python objects travel through CPU memory (gloo); objects are pickled, between processes of one run only.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

Item = TypeVar("Item")


def num_ranks() -> int:
    """Processes that train together; 1 where no process group has been made."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Index of this process, from 0."""
    return dist.get_rank() if num_ranks() > 1 else 0


def is_first() -> bool:
    """Whether this process is the one that writes files."""
    return rank() == 0


def total(value: float) -> float:
    """Add a number up over the ranks."""
    return _reduced(value, dist.ReduceOp.SUM) if num_ranks() > 1 else value


def largest(value: float) -> float:
    """Take the largest of the ranks' numbers."""
    return _reduced(value, dist.ReduceOp.MAX) if num_ranks() > 1 else value


def any_rank(value: bool) -> bool:
    """Say whether it is true on some rank."""
    return largest(float(value)) > 0


def gather(item: Item) -> list[Item]:
    """Bring every rank's item to the first rank, in order; the others get an empty list.

    One after another, so that beside the items themselves only one is there in pickled form.
    """
    if num_ranks() == 1:
        return [item]
    if is_first():
        return [item, *(_received(source) for source in range(1, num_ranks()))]
    dist.send_object_list([item], dst=0)
    return []


def gather_to_all(item: Item) -> list[Item]:
    """Bring every rank's item to all ranks, in order."""
    if num_ranks() == 1:
        return [item]
    items: list[Any] = [None] * num_ranks()
    dist.all_gather_object(items, item)
    return items


def scatter(items: Sequence[Item]) -> Item:
    """Hand the first rank's items out, one to each rank; what the others pass is ignored."""
    if num_ranks() == 1:
        return items[0]
    received: list[Any] = [None]
    dist.scatter_object_list(received, list(items) if is_first() else None, src=0)
    return received[0]


def deal(make: Callable[[int], Item]) -> Item:
    """Hand each rank an item that the first rank makes for it.

    Args:
        make: from a rank to its item; called on the first rank, which makes no item before it has sent the one before.
    """
    if not is_first():
        return _received(0)
    for other in range(1, num_ranks()):
        dist.send_object_list([make(other)], dst=other)
    return make(0)


def broadcast(item: Item) -> Item:
    """Give the first rank's item to all."""
    if num_ranks() == 1:
        return item
    items = [item]
    dist.broadcast_object_list(items, src=0)
    return items[0]


def _received(source: int) -> Any:  # noqa: ANN401 - whatever was sent
    received: list[Any] = [None]
    dist.recv_object_list(received, src=source)
    return received[0]


def _reduced(value: float, operation: Any) -> float:  # noqa: ANN401 - torch.distributed's operators have no common type
    tensor: Tensor = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(tensor, op=operation)
    return float(tensor)
