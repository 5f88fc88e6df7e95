"""Collectives of several ranks, of which one stands alone here: in which order things are made and sent."""

import pytest
import torch.distributed as dist

from trm_repro import ranks


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the first of three ranks sends and receives."""
    seen: list[str] = []

    def receive(items: list[object], src: int) -> None:
        seen.append(f"receive from {src}")
        items[0] = f"item of {src}"

    monkeypatch.setattr(ranks, "num_ranks", lambda: 3)
    monkeypatch.setattr(ranks, "rank", lambda: 0)
    monkeypatch.setattr(dist, "send_object_list", lambda items, dst: seen.append(f"send {items[0]} to {dst}"))
    monkeypatch.setattr(dist, "recv_object_list", receive)
    return seen


def test_the_first_rank_makes_no_share_before_the_one_before_it_is_sent(log: list[str]):
    own = ranks.deal(lambda rank: log.append(f"make {rank}") or f"share {rank}")
    assert own == "share 0"
    assert log == ["make 1", "send share 1 to 1", "make 2", "send share 2 to 2", "make 0"]


def test_items_come_to_the_first_rank_one_after_another_in_order(log: list[str]):
    assert ranks.gather("own") == ["own", "item of 1", "item of 2"]
    assert log == ["receive from 1", "receive from 2"]


def test_another_rank_makes_nothing_and_takes_what_it_is_sent(log: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ranks, "rank", lambda: 2)
    assert ranks.deal(lambda rank: pytest.fail("only the first rank makes shares")) == "item of 0"
    assert ranks.gather("own") == []
    assert log == ["receive from 0", "send own to 0"]


def test_one_process_talks_to_nobody():
    assert ranks.deal(lambda rank: rank) == 0
    assert ranks.gather("own") == ["own"]
