"""Sampling ahead: what is taken is what was begun, and how long sampling and waiting took."""

import threading

import pytest

from tests.unit.test_module import rollouts_of, small_config
from trm_repro.rollout import ahead
from trm_repro.rollout.ahead import Lag, RolloutsAhead


class Clock:
    """Stands still until the sampler moves it, which it may once the main thread has begun to wait."""

    def __init__(self) -> None:
        self.now = 0.0
        self.main = threading.current_thread()
        self.is_waiting = threading.Event()

    def __call__(self) -> float:
        now = self.now
        if threading.current_thread() is self.main:
            self.is_waiting.set()
        return now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(ahead.time, "perf_counter", clock)
    return clock


def test_training_that_comes_early_waits_for_the_rest_of_the_sampling(clock: Clock):
    rollouts, begun = rollouts_of(small_config()), threading.Event()

    def sample():
        begun.set()
        assert clock.is_waiting.wait(60)
        clock.now = 10.0
        return rollouts

    ahead_of_training = RolloutsAhead()
    ahead_of_training.begin(4, sample)
    assert begun.wait(60)
    clock.now = 3.0
    assert ahead_of_training.take(4) is rollouts
    assert ahead_of_training.lag == Lag(sampling=10.0, waiting=7.0)
    assert ahead_of_training.has_taken
    assert ahead_of_training.take(4) is None
    assert ahead_of_training.lag == Lag()


def test_training_that_comes_late_does_not_wait(clock: Clock):
    rollouts = rollouts_of(small_config())

    def sample():
        clock.now += 5.0
        return rollouts

    ahead_of_training = RolloutsAhead()
    ahead_of_training.begin(0, sample)
    assert ahead_of_training.future is not None
    assert ahead_of_training.future.result(60)[1] == 5.0
    clock.now = 60.0
    assert ahead_of_training.take(0) is rollouts
    assert ahead_of_training.lag == Lag(sampling=5.0, waiting=0.0)


def test_another_step_than_the_one_in_the_making_has_no_rollouts():
    ahead_of_training = RolloutsAhead()
    ahead_of_training.begin(1, lambda: rollouts_of(small_config()))
    assert ahead_of_training.take(2) is None
    assert not ahead_of_training.has_taken


def test_what_goes_wrong_while_sampling_is_raised_where_it_is_waited_for():
    def sample():
        raise ValueError("the engine is gone")

    ahead_of_training = RolloutsAhead()
    ahead_of_training.begin(1, sample)
    with pytest.raises(ValueError, match="the engine is gone"):
        ahead_of_training.take(1)
