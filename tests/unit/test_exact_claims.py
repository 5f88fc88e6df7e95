"""Claims that need no run: Table 1 by its formulas, token-level methods by enumeration."""

import pytest

from evaluation import exact_claims
from evaluation.claim_rows import ClaimThresholds
from pipelines.bounds import TABLE_1, TABLE_1_PRINTED
from trm_repro.bounds import Divergences, every_bound


@pytest.fixture(scope="module")
def exact_rows():
    return exact_claims.exact_claims(ClaimThresholds(num_random_pairs=400))


def test_table_1_and_its_factor_are_recomputed(exact_rows):
    table, factor = exact_rows[:2]
    assert (table.verdict, table.effects[0].estimate, table.num_seeds) == ("reproduced", 16, None)
    # T (T-1) delta over 4 T epsilon TV_seq.
    assert factor.effects[0].estimate == pytest.approx(4095 * 1e-4 / (4 * 5e-3 * 0.05))
    assert factor.verdict == "reproduced"
    assert "within a column the factor is 204.8 and 204.8" in factor.note


def test_table_1_is_not_reproduced_at_a_tolerance_below_the_prints_rounding():
    table, factor = exact_claims.exact_claims(ClaimThresholds(num_random_pairs=1, table_tolerance=1e-4))[:2]
    assert table.effects[0].estimate < 16
    assert (table.verdict, factor.verdict) == ("not reproduced", "not reproduced")


def test_table_1_is_the_one_that_the_bounds_command_prints():
    assert list(exact_claims.TABLE_1_PRINTED) == list(TABLE_1_PRINTED)
    for name, printed in TABLE_1_PRINTED.items():
        assert exact_claims.TABLE_1_PRINTED[name] == tuple(float(text.removeprefix("<= ")) for text in printed)
        assert (name in exact_claims.TABLE_1_LIMITS) == printed[0].startswith("<= ")
    for ours, setting in zip(exact_claims.TABLE_1_COLUMNS, TABLE_1.values(), strict=True):
        length, delta, *_ = setting.values()
        others = {key: value for key, value in setting.items() if key not in ("length", "delta")}
        theirs = every_bound(Divergences.at_most(length, delta, **others))
        assert {name: float(value) for name, value in every_bound(ours).items()} == theirs


def test_token_level_methods_leave_a_flips_maximum_and_not_every_pairs(exact_rows):
    flip, random_pairs = exact_rows[2:]
    assert flip.verdict == "reproduced"
    assert [effect.estimate for effect in flip.effects[:2]] == [1.0, 1.0]
    assert 0 < flip.effects[2].estimate <= 0.05
    clip, token_mask = (effect.estimate for effect in random_pairs.effects)
    assert random_pairs.verdict == "not reproduced"
    assert 0.7 < token_mask < clip <= 1.0
