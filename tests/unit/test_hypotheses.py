"""Hypotheses of a study: what has to be so, and the verdict over seeds."""

import dataclasses

import pytest

from evaluation.hypotheses import Hypothesis, HypothesisPart, hypotheses_table, judge_hypotheses
from evaluation.outcomes import RunOutcome
from tests.unit.test_outcomes import outcome
from trm_repro.config_sections.claims import ClaimThresholds

ABOVE = Hypothesis(text="A ends above B.", parts=(HypothesisPart(quantity="final score", arm="a", against="b"),))
LASTS = Hypothesis(
    text="A lasts.",
    parts=(HypothesisPart(quantity="lasting collapse", arm="a", relation="<", threshold=1, every_seed=True),),
)


def runs(arm: str, finals: list[float], collapsed: bool | None = False) -> list[RunOutcome]:
    return [
        dataclasses.replace(outcome(arm=arm, seed=seed), final_score=final, has_collapsed=collapsed)
        for seed, final in enumerate(finals)
    ]


def verdict_of(hypothesis: Hypothesis, outcomes: list[RunOutcome]) -> str:
    (row,) = judge_hypotheses([hypothesis], outcomes, ClaimThresholds())
    return row.verdict


FIVE = [0.5, 0.6, 0.7, 0.8, 0.9]


@pytest.mark.parametrize(
    ("others", "wanted"),
    [
        ([0.4, 0.4, 0.4, 0.4, 0.4], "supported"),
        ([0.95, 0.95, 0.95, 0.95, 0.95], "refuted"),
        ([0.4, 0.7, 0.6, 0.9, 0.8], "not supported"),
        ([0.4, 0.4, 0.4, 0.4], "not supported"),  # four seeds
        ([], "not run"),
    ],
)
def test_the_paired_interval_over_seeds_decides(others, wanted):
    assert verdict_of(ABOVE, runs("a", FIVE) + runs("b", others)) == wanted


def test_pairs_are_made_by_seed_and_not_by_order():
    shifted = [dataclasses.replace(run, final_score=run.final_score - 0.1) for run in reversed(runs("a", FIVE))]
    others = [dataclasses.replace(run, arm="b") for run in shifted]
    (row,) = judge_hypotheses([ABOVE], runs("a", FIVE) + others, ClaimThresholds())
    (effect,) = row.effects
    assert (effect.low, effect.high) == pytest.approx((0.1, 0.1))


def test_what_has_to_be_so_in_every_seed_is_refuted_by_one():
    assert verdict_of(LASTS, runs("a", FIVE)) == "supported"
    assert verdict_of(LASTS, runs("a", FIVE[:4])) == "not supported"  # too few to say so
    one = [*runs("a", FIVE[:4]), dataclasses.replace(runs("a", FIVE)[4], has_collapsed=True)]
    assert verdict_of(LASTS, one) == "refuted"
    unknown = [*runs("a", FIVE[:4]), dataclasses.replace(runs("a", FIVE)[4], has_collapsed=None)]
    assert verdict_of(LASTS, unknown) == "not supported"


def test_all_parts_have_to_hold():
    both = Hypothesis(text="Both.", parts=(*ABOVE.parts, *LASTS.parts))
    low = runs("b", [0.1] * 5)
    assert verdict_of(both, runs("a", FIVE) + low) == "supported"
    assert verdict_of(both, runs("a", FIVE, collapsed=True) + low) == "refuted"


def test_p_values_are_corrected_over_the_hypotheses_of_a_cell():
    below = Hypothesis(
        text="B ends below A.", parts=(HypothesisPart(quantity="final score", arm="b", against="a", relation="<"),)
    )
    rows = judge_hypotheses([ABOVE, below], runs("a", FIVE) + runs("b", [0.1] * 5), ClaimThresholds())
    assert [(row.p_value, row.adjusted_p_value) for row in rows] == [(1 / 32, 2 / 32)] * 2
    assert [row.verdict for row in rows] == ["not supported"] * 2  # 1/32 alone would have been enough
    six = [*FIVE, 0.9]
    rows = judge_hypotheses([ABOVE, below], runs("a", six) + runs("b", [0.1] * 6), ClaimThresholds())
    assert [(row.p_value, row.adjusted_p_value, row.verdict) for row in rows] == [(1 / 64, 1 / 32, "supported")] * 2
    assert "| A ends above B. | final score, a minus b > 0 (mean over seeds) | 6 |" in hypotheses_table(rows)


def test_an_arm_of_another_cell_is_paired_by_seed_and_told_from_its_namesake():
    slower = HypothesisPart(quantity="final score", arm="a", against="a", against_cell="fast")
    hypothesis = Hypothesis(text="A ends above fast A.", parts=(slower,))
    shifted = [dataclasses.replace(run, final_score=run.final_score - 0.2) for run in reversed(runs("a", FIVE))]
    (row,) = judge_hypotheses([hypothesis], runs("a", FIVE), ClaimThresholds(), elsewhere={"fast": shifted})
    assert (row.effects[0].low, row.effects[0].high) == pytest.approx((0.2, 0.2))
    assert (row.num_seeds, row.verdict) == (5, "supported")
    assert "final score, a minus a of fast > 0" in hypotheses_table([row])
    assert verdict_of(hypothesis, runs("a", FIVE)) == "not run"


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ({"against_cell": "fast"}, "against_cell 'fast' needs against"),
        ({"quantity": "luck"}, "quantity must be one of"),
        ({"relation": ">="}, "relation must be"),
        ({"threshold": float("nan")}, "threshold must be finite"),
    ],
)
def test_a_part_that_cannot_be_measured_is_refused(values, wanted):
    with pytest.raises(ValueError, match=wanted):
        HypothesisPart(**({"quantity": "final score", "arm": "a"} | values))
