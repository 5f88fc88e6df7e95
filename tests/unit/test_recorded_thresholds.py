"""Claims are tested with the thresholds that the runs were started with."""

import dataclasses

import pytest

from evaluation.recorded_thresholds import recorded_thresholds
from trm_repro.config_sections.claims import ClaimThresholds


def logged(**changes):
    """A run's parameters as a tracking server has them: text."""
    values = dataclasses.asdict(ClaimThresholds(**changes))
    return {"num_steps": "60"} | {f"claims.{name}": str(value) for name, value in values.items()}


def test_what_was_recorded_is_read_back_and_agrees_in_silence():
    thresholds = ClaimThresholds(improvement=0.1, is_holm_required=True, min_seeds=7, confidence=0.9)
    found = recorded_thresholds({"a": logged(**dataclasses.asdict(thresholds))}, thresholds)
    assert (found.thresholds, found.warnings) == (thresholds, [])


def test_a_configuration_changed_after_the_runs_is_named_and_not_used():
    found = recorded_thresholds({"a": logged(), "b": logged()}, ClaimThresholds(improvement=0.01))
    assert found.thresholds == ClaimThresholds()
    (warning,) = found.warnings
    assert "improvement is 0.01 now, was 0.05" in warning
    assert "tested with those of the runs" in warning


def test_runs_with_different_thresholds_are_named():
    given = ClaimThresholds(acceptance=0.6)
    found = recorded_thresholds({"a": logged(), "b": logged(acceptance=0.6)}, given)
    assert found.thresholds == given
    (warning,) = found.warnings
    assert "acceptance: 0.6 and 0.7" in warning


def test_runs_recorded_without_thresholds_are_counted():
    found = recorded_thresholds(
        {"a": {"num_steps": "60"}, "b": logged(acceptance=0.6)}, ClaimThresholds(acceptance=0.6)
    )
    assert found.thresholds.acceptance == 0.6
    (warning,) = found.warnings
    assert warning.startswith("1 of 2 runs were recorded without the claims' thresholds (a)")
    nothing = recorded_thresholds({"a": {}}, ClaimThresholds())
    assert (nothing.thresholds, len(nothing.warnings)) == (ClaimThresholds(), 1)


@pytest.mark.parametrize(("key", "text"), [("min_seeds", "many"), ("is_holm_required", "yes"), ("confidence", "2.0")])
def test_recorded_values_that_are_none_are_said_to_be(key, text):
    found = recorded_thresholds({"a": logged() | {f"claims.{key}": text}}, ClaimThresholds())
    assert found.thresholds == ClaimThresholds()
    assert "cannot be read" in found.warnings[0]
