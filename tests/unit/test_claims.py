"""Claims: verdicts at their boundaries, on points made by hand."""

import dataclasses
import math

import pandas as pd
import pytest

from evaluation.claim_rows import MeasuredPart, adjust_for_number, judge_part, judge_row
from evaluation.claims import (
    FLAT_GATES,
    LABELS,
    MAX_GATE,
    RUN_CLAIMS,
    ClaimRow,
    ClaimThresholds,
    Effect,
    claims_summary,
    claims_table,
    evaluate_claims,
)
from evaluation.length_bias import LengthRow
from evaluation.outcomes import ACCEPTANCE, GAP, IMPROVED_BY, NUM_REFUTING, SCORE
from trm_repro.config import arm_names

THRESHOLDS = ClaimThresholds(num_random_pairs=1, num_resamples=500)
COLUMNS = ["arm", "seed", "run_id", "metric", "step", "value"]
RUN_SOURCES = ("Figure", "Acceptance", "Control", "Guarantee", "Table 2")


def run_points(arm, seed, *, start=0.4, final=0.4, first_gap=0.01, gap=0.01, kept=1.0, refuting=0.0, num_steps=8):
    """Points of a run: scores at both ends, a gap a quarter, kept fraction and refuting sequences."""
    values = [
        (SCORE, 0, start),
        (SCORE, num_steps, final),
        (GAP, 1, first_gap),
        (GAP, num_steps, gap),
        (ACCEPTANCE, 1, kept),
        (NUM_REFUTING, 1, refuting),
    ]
    run = {"arm": arm, "seed": seed, "run_id": f"{arm}-{seed}"}
    return [run | {"metric": metric, "step": step, "value": value} for metric, step, value in values]


def paper_runs(num_seeds, **changes):
    """Runs in which every claim about runs but the guarantee's holds; changes replace an arm's numbers."""
    arms = {
        "token_is": {"final": 0.5, "gap": 0.02},
        "ppo_clip": {"final": 0.2, "gap": 0.3},
        "trm_max_0.05": {"final": 0.7, "gap": 0.011, "kept": 0.8},
        "trm_avg_0.001": {"final": 0.75, "gap": 0.012, "kept": 0.9},
        "trm_max_0.1": {"final": 0.3, "gap": 0.1},
        "trm_avg_0.002": {"final": 0.35, "gap": 0.1},
        "trm_max_0.1_avg_0.002": {"final": 0.7, "gap": 0.012},
    }
    arms |= {f"{kind}_as_{arm}": {"final": 0.1, "gap": 0.1} for kind in ("random", "length") for arm in LABELS}
    points = []
    for arm, numbers in arms.items():
        for seed in range(num_seeds):
            shifted = {key: value + (0.002 * seed if key == "final" else 0) for key, value in numbers.items()}
            points += run_points(arm, seed, **(shifted | changes.get(arm, {})))
    return pd.DataFrame(points, columns=COLUMNS)


def length_rows(rejections):
    """Rows of two problem sizes: (short, long) rejection by gate."""
    return [
        LengthRow(
            seed=0,
            num_operands=size,
            num_sequences=64,
            mean_length=6.0 * size,
            token_violation_fraction=0.01,
            predicted_rejection=0.5,
            rejection={gate: ends[index] for gate, ends in rejections.items()},
        )
        for index, size in ((1, 50), (0, 8))  # not in the order of length
    ]


PAPER_LENGTHS = {MAX_GATE: (0.3, 0.9)} | {gate: (0.2, 0.25) for gate in FLAT_GATES}


def evaluate(points, *, thresholds=THRESHOLDS, rejections=None, num_seeds=0):
    by_seed = {seed: length_rows(rejections) for seed in range(num_seeds)} if rejections else None
    return evaluate_claims(points, thresholds, by_seed)


def row_of(rows, words):
    (row,) = [row for row in rows if words in row.text]
    return row


def about_runs(rows):
    return [row for row in rows if row.source.startswith(RUN_SOURCES) and row.num_seeds is not None]


def part(values, relation=">", threshold=0.0):
    return MeasuredPart(name="what", values=tuple(values), relation=relation, threshold=threshold)


def judge(*parts, thresholds=THRESHOLDS, **keywords):
    row = ClaimRow(source="s", text="t", data="d", num_seeds=len(parts[0].values))
    return judge_row(row, parts, thresholds, **keywords)


# --- parts and verdicts ---


@pytest.mark.parametrize(
    ("values", "standing"),
    [
        ([0.1, 0.2, 0.3, 0.2, 0.1], "holds"),
        ([-0.1, -0.2, -0.3, -0.2, -0.1], "fails"),
        ([0.0] * 5, "fails"),  # at the threshold is not above it
        ([1e-9] * 5, "holds"),
        ([0.5, 0.5, 0.5, 0.5, -0.01], "undecided"),  # the interval is above 0; the test, 2/32, does not follow
        ([0.3, -0.3, 0.2, -0.2, 0.1], "undecided"),
        ([0.1, 0.2, 0.3, 0.2], "undecided"),  # four seeds
        ([0.1, 0.2, 0.3, 0.2, math.nan], "undecided"),
        ([0.1, 0.2, 0.3, 0.2, math.inf], "undecided"),
    ],
)
def test_a_part_holds_where_interval_and_test_agree_on_either_side(values, standing):
    assert judge_part(part(values), THRESHOLDS).standing == standing
    mirrored = part([-value for value in values], relation="<")
    assert judge_part(mirrored, THRESHOLDS).standing == standing


def test_a_part_is_compared_with_its_threshold():
    values = [0.06, 0.07, 0.08, 0.07, 0.06]
    assert judge_part(part(values, threshold=0.05), THRESHOLDS).standing == "holds"
    assert judge_part(part(values, threshold=0.07), THRESHOLDS).standing == "undecided"
    assert judge_part(part(values, threshold=0.09), THRESHOLDS).standing == "fails"
    assert part(values, threshold=0.05).describe() == "what > 0.05"


def test_a_significance_below_what_the_seeds_can_reach_decides_nothing():
    strict = dataclasses.replace(THRESHOLDS, significance=0.03)  # five seeds reach 1/32 = 0.03125
    assert judge_part(part([0.1, 0.2, 0.3, 0.2, 0.1]), strict).standing == "undecided"
    assert judge_part(part([0.1, 0.2, 0.3, 0.2, 0.1, 0.1]), strict).standing == "holds"


def test_an_effect_says_what_its_ends_are():
    few = judge_part(part([0.1, 0.4]), THRESHOLDS).effect
    assert str(few) == "0.25 (range 0.1 to 0.4)"
    enough = judge_part(part([0.1] * 5), THRESHOLDS).effect
    assert str(enough) == "0.1 (0.1 to 0.1)"
    assert str(Effect.exact(409.5)) == "409.5 (exact)"
    assert str(judge_part(part([0.1]), THRESHOLDS).effect) == "0.1"
    broken = judge_part(part([math.nan, 0.2, 0.4, 0.3, 0.3]), THRESHOLDS).effect
    assert str(broken) == "0.3 (range 0.2 to 0.4)"
    assert str(judge_part(part([math.nan]), THRESHOLDS).effect) == "not measured"


GOOD, BAD, MIXED = [0.1, 0.2, 0.3, 0.2, 0.1], [-0.1] * 5, [0.3, -0.3, 0.2, -0.2, 0.1]


@pytest.mark.parametrize(
    ("parts", "verdict"),
    [
        ([GOOD, GOOD], "reproduced"),
        ([GOOD, BAD], "not reproduced"),
        ([MIXED, BAD], "not reproduced"),
        ([GOOD, MIXED], "inconclusive"),
        ([GOOD[:4], GOOD[:4]], "inconclusive"),
        ([BAD[:4], BAD[:4]], "inconclusive"),
        ([[], []], "not run"),
    ],
)
def test_a_claim_needs_all_its_parts_and_one_that_fails_is_enough_against_it(parts, verdict):
    row = judge(*(part(values) for values in parts))
    assert row.verdict == verdict
    assert row.test == "what > 0; what > 0"
    assert (row.p_value is None) == (len(parts[0]) < 5)


def test_the_p_value_of_a_claim_is_its_weakest_parts():
    assert judge(part(GOOD), part([0.5, 0.5, 0.5, 0.5, -0.01])).p_value == 2 / 32


def test_runs_that_cannot_be_compared_decide_nothing():
    assert judge(part(GOOD), is_comparable=False).verdict == "inconclusive"


def test_a_seed_without_a_value_is_counted_and_not_left_out():
    row = judge(part([*GOOD, math.nan]), part([math.nan, *GOOD]))
    assert row.verdict == "inconclusive"
    assert row.note == "undecided for 2 seeds without a value"


def test_holm_runs_over_the_claims_with_a_p_value_and_decides_where_it_is_required():
    rows = [judge(part(GOOD)), judge(part(GOOD[:2])), judge(part(GOOD))]
    free = adjust_for_number(rows, THRESHOLDS)
    assert [row.adjusted_p_value for row in free] == [2 / 32, None, 2 / 32]
    assert [row.verdict for row in free] == ["reproduced", "inconclusive", "reproduced"]
    bound = adjust_for_number(rows, dataclasses.replace(THRESHOLDS, is_holm_required=True))
    assert [row.verdict for row in bound] == ["inconclusive"] * 3
    assert bound[0].note == "holds by itself, not after Holm's correction"


# --- claims about runs ---


def test_without_runs_every_claim_about_runs_is_not_run():
    rows = evaluate(pd.DataFrame(columns=COLUMNS))
    assert {row.verdict for row in about_runs(rows)} == {"not run"}
    assert {row.num_seeds for row in about_runs(rows)} == {0}


@pytest.mark.parametrize("num_seeds", [1, 2, 3, 4])
def test_below_five_seeds_nothing_about_runs_is_decided(num_seeds):
    for points in (paper_runs(num_seeds), paper_runs(num_seeds, **{"trm_max_0.05": {"refuting": 9.0}})):
        rows = about_runs(evaluate(points, rejections=PAPER_LENGTHS, num_seeds=num_seeds))
        assert len(rows) == len(RUN_CLAIMS) + 4
        assert {row.verdict for row in rows} <= {"inconclusive", "not run"}
        assert [row.source for row in rows if row.verdict == "not run"] == ["Figures 1 to 3"]
        assert {row.p_value for row in rows} == {None}


def test_five_seeds_that_are_as_the_paper_says_reproduce_it():
    rows = evaluate(paper_runs(5), rejections=PAPER_LENGTHS, num_seeds=5)
    verdicts = {row.text: row.verdict for row in about_runs(rows)}
    assert {verdicts.pop(row.text) for row in rows if row.source in ("Guarantee", "Figures 1 to 3")} == {
        "inconclusive",  # nothing sampled confirms the guarantee's condition
        "not run",  # the paper's scale
    }
    assert set(verdicts.values()) == {"reproduced"}


@pytest.mark.parametrize(
    ("arm", "numbers", "words", "verdict"),
    [
        ("token_is", {"final": 0.1}, "PPO clipping ends", "not reproduced"),
        ("token_is", {"gap": 0.5}, "PPO clipping ends", "not reproduced"),
        ("token_is", {"gap": 0.3}, "PPO clipping ends", "not reproduced"),  # no larger than PPO's
        ("trm_max_0.05", {"final": 0.4}, "TRM-Max 0.05 stays", "not reproduced"),
        ("trm_max_0.05", {"gap": 0.4}, "TRM-Max 0.05 stays", "not reproduced"),
        ("trm_max_0.05", {"first_gap": 0.001, "gap": 0.02}, "TRM-Max 0.05 stays", "not reproduced"),  # 20 times
        ("trm_max_0.05", {"first_gap": 0.001, "gap": 0.009}, "TRM-Max 0.05 stays", "reproduced"),  # 9 times
        ("trm_max_0.05", {"gap": math.nan}, "TRM-Max 0.05 stays", "inconclusive"),
        ("ppo_clip", {"final": 0.9}, "TRM-Avg 0.001 stays", "not reproduced"),
        ("trm_max_0.1", {"start": 0.4, "final": 0.46}, "TRM-Max 0.1 alone", "not reproduced"),
        ("trm_max_0.1", {"start": 0.4, "final": 0.44}, "TRM-Max 0.1 alone", "reproduced"),
        ("trm_avg_0.002", {"final": 0.9}, "TRM-Avg 0.002 alone", "not reproduced"),
        ("trm_max_0.1_avg_0.002", {"final": 0.44}, "together hold", "not reproduced"),
        ("trm_max_0.05", {"kept": 0.7}, "TRM-Max 0.05 keeps", "not reproduced"),
        ("trm_avg_0.001", {"kept": 0.71}, "TRM-Avg 0.001 keeps", "reproduced"),
        ("random_as_trm_avg_0.001", {"final": 0.9}, "TRM-Avg 0.001 ends above random rejection of", "not reproduced"),
        ("random_as_trm_max_0.05", {"final": 0.9}, "TRM-Avg 0.001 ends above random rejection of", "reproduced"),
        ("length_as_trm_max_0.05", {"final": 0.9}, "TRM-Max 0.05 ends above random rejection m", "not reproduced"),
        ("length_as_trm_max_0.05", {"final": 0.9}, "TRM-Max 0.05 ends above random rejection of", "reproduced"),
        ("trm_max_0.05", {"refuting": 1.0}, "the condition holds", "not reproduced"),
        ("trm_max_0.05", {"refuting": math.nan}, "the condition holds", "inconclusive"),
    ],
)
def test_a_claim_turns_where_its_arm_does(arm, numbers, words, verdict):
    assert row_of(evaluate(paper_runs(5, **{arm: numbers})), words).verdict == verdict


def test_one_refuting_run_of_many_is_enough():
    points = paper_runs(6)
    is_one = (points.arm == MAX_GATE) & (points.seed == 3) & (points.metric == NUM_REFUTING)
    points.loc[is_one, "value"] = 1.0
    row = row_of(evaluate(points), "the condition holds")
    assert row.verdict == "not reproduced"
    assert row.effects[0].estimate == pytest.approx(1 / 6)


def test_seeds_count_only_where_all_arms_were_run():
    points = paper_runs(6)
    points = points[~((points.arm == "token_is") & (points.seed >= 4))]
    row = row_of(evaluate(points), "PPO clipping ends")
    assert (row.num_seeds, row.verdict) == (4, "inconclusive")
    assert row.note == "seeds that lack an arm: 2"


def test_runs_of_different_length_are_not_compared():
    points = paper_runs(6, token_is={"num_steps": 6})
    row = row_of(evaluate(points), "PPO clipping ends")
    assert row.verdict == "inconclusive"
    assert "runs have 6 to 8 steps" in row.note


def test_thresholds_move_the_tests_and_their_words():
    thresholds = dataclasses.replace(THRESHOLDS, improvement=0.4)
    row = row_of(evaluate(paper_runs(5), thresholds=thresholds), "together hold")
    assert row.verdict == "not reproduced"
    assert "final minus start > 0.4" in row.test
    assert ClaimThresholds().improvement == IMPROVED_BY


# --- Table 2 ---


@pytest.mark.parametrize(
    ("gate", "ends", "grows", "is_flat"),
    [
        (MAX_GATE, (0.3, 0.41), "reproduced", "reproduced"),
        (MAX_GATE, (0.3, 0.39), "not reproduced", "reproduced"),
        (MAX_GATE, (0.95, 1.0), "inconclusive", "reproduced"),  # no room to grow
        (FLAT_GATES[1], (0.2, 0.31), "reproduced", "not reproduced"),
        (FLAT_GATES[2], (0.4, 0.2), "reproduced", "not reproduced"),
    ],
)
def test_table_2_compares_the_longest_with_the_shortest(gate, ends, grows, is_flat):
    rows = evaluate(pd.DataFrame(columns=COLUMNS), rejections=PAPER_LENGTHS | {gate: ends}, num_seeds=5)
    assert row_of(rows, "TRM-Max rejects more").verdict == grows
    assert row_of(rows, "about as much at any length").verdict == is_flat


def test_a_seed_whose_rows_lack_a_gate_does_not_count():
    rows = evaluate(pd.DataFrame(columns=COLUMNS), rejections={MAX_GATE: (0.3, 0.9)}, num_seeds=5)
    assert row_of(rows, "TRM-Max rejects more").verdict == "not run"


# --- tables and thresholds ---


def test_tables_have_a_line_a_claim_and_as_many_cells_in_each():
    rows = evaluate(paper_runs(5), rejections=PAPER_LENGTHS, num_seeds=5)
    lines = claims_table(rows).splitlines()
    assert len(lines) == len(rows) + 2
    assert len({line.count("|") for line in lines}) == 1
    line = next(line for line in claims_table(rows).splitlines() if "PPO clipping ends" in line)
    assert "| reproduced | 5 |" in line
    assert "| 1.18 (1.18 to 1.18); 0.3 (0.3 to 0.3) |" in line  # log10(0.3 / 0.02) = 1.176
    assert "| 0.031 (0.625) |" in line  # 1/32, and times the twenty claims with a p-value


@pytest.mark.parametrize(
    ("num_seeds", "end"),
    [
        (5, "1 claim was not run; the report lists it."),  # the paper's scale
        (0, "{n} claims were not run; the report lists them."),
    ],
)
def test_the_summary_lists_claims_that_were_run_and_counts_the_others(num_seeds, end):
    points = paper_runs(num_seeds) if num_seeds else pd.DataFrame(columns=COLUMNS)
    rows = evaluate(points, rejections=PAPER_LENGTHS if num_seeds else None, num_seeds=num_seeds)
    run = [row for row in rows if row.verdict != "not run"]
    lines = claims_summary(rows).splitlines()
    assert lines[-2:] == ["", end.format(n=len(rows) - len(run))]
    assert [line.split(" | ")[1] for line in lines[2:-2]] == [row.text for row in run]
    assert claims_summary(run).splitlines() == lines[:-2]


def test_a_summary_of_claims_that_were_all_not_run_is_one_line():
    row = row_of(evaluate(pd.DataFrame(columns=COLUMNS)), "paper's scale")
    assert claims_summary([row]) == "1 claim was not run; the report lists it."


def test_no_effect_of_seeds_that_differ_stands_without_its_range():
    for row in evaluate(paper_runs(2)):
        for effect in row.effects:
            assert effect.kind in ("range", "exact")
            assert ("(" in str(effect)) == (effect.kind == "exact" or effect.low < effect.high)


def test_the_scale_of_the_paper_is_said_to_be_out_of_reach():
    row = row_of(evaluate(pd.DataFrame(columns=COLUMNS)), "paper's scale")
    assert (row.verdict, row.note) == ("not run", "cannot be tested on the miniature")


def test_claims_name_arms_that_can_be_run_and_have_texts_of_their_own():
    assert {arm for claim in RUN_CLAIMS for arm in claim.arms} <= set(arm_names())
    texts = [row.text for row in evaluate(pd.DataFrame(columns=COLUMNS))]
    assert len(set(texts)) == len(texts)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("min_seeds", 4),
        ("confidence", 1.0),
        ("significance", 0.0),
        ("num_resamples", 99),
        ("improvement", -0.1),
        ("score_difference", math.nan),
        ("gap_factor", 0.9),
        ("bounded_gap_factor", 1.0),
        ("bounded_gap_factor", math.inf),
        ("acceptance", 1.1),
        ("flat_within", 0.0),
        ("length_growth", 1.0),
        ("table_tolerance", math.nan),
        ("num_random_pairs", 0),
    ],
)
def test_thresholds_out_of_range_are_refused(name, value):
    with pytest.raises(ValueError, match=rf"claims\.{name} must be"):
        ClaimThresholds(**{name: value})
