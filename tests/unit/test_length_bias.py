"""Table 2 and the token-level figure: counts by hand, predictions by formula."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch

from evaluation.length_bias import LengthSample, draw_length_bias, length_rows, length_table, rows_by_seed
from evaluation.token_level import LABELS, draw_token_level
from pipelines.lengths import parse_length_rows
from trm_repro.errors import InputError


def sample(size: int, lengths: list[int], violating: list[int], kept: list[bool]) -> LengthSample:
    """Responses of given lengths, the first tokens of each violating."""
    width = max(lengths)
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    kl = torch.where(torch.arange(width) < torch.tensor(violating)[:, None], 0.2, 0.0)
    kl = torch.where(mask, kl, torch.nan)  # whatever stands on padding is ignored
    return LengthSample(num_operands=size, kl=kl, response_mask=mask, masks={"gate": torch.tensor(kept)})


SAMPLES = [sample(2, [2, 2], [1, 0], [False, True]), sample(5, [8, 8], [1, 0], [False, False])]


def test_rejection_and_violations_are_counted_by_size():
    short, long = length_rows(SAMPLES, threshold=0.05, seed=1)
    assert (short.rejection["gate"], long.rejection["gate"]) == (0.5, 1.0)
    assert (short.token_violation_fraction, long.token_violation_fraction) == (0.25, 1 / 16)
    assert (short.mean_length, long.mean_length) == (2.0, 8.0)


def test_prediction_takes_the_violation_rate_of_all_sizes():
    rows = length_rows(SAMPLES, threshold=0.05, seed=1)
    p = 2 / 20  # two of twenty tokens
    assert rows[0].predicted_rejection == pytest.approx(1 - (1 - p) ** 2)
    assert rows[1].predicted_rejection == pytest.approx(1 - (1 - p) ** 8)


def test_a_token_at_the_threshold_does_not_violate():
    exact = sample(2, [2], [1], [True])
    assert length_rows([exact], threshold=float(torch.tensor(0.2)), seed=1)[0].token_violation_fraction == 0.0


def test_table_has_a_line_a_size_and_a_column_a_gate():
    lines = length_table(length_rows(SAMPLES, threshold=0.05, seed=1)).splitlines()
    assert lines[0].endswith("| gate |")
    assert lines[2] == "| 2 | 1 | 2 | 2 | 0.2500 | 0.19 | 0.50 |"
    assert len(lines) == 4


def test_several_seeds_stand_as_mean_smallest_and_largest():
    others = [dataclasses.replace(row, seed=2, rejection={"gate": 0.2}) for row in length_rows(SAMPLES, 0.05, seed=2)]
    rows = [*length_rows(SAMPLES, 0.05, seed=1), *others]
    short = length_table(rows).splitlines()[2]
    assert short.startswith("| 2 | 2 | 4 | 2 (2 to 2) |")
    assert short.endswith("| 0.35 (0.20 to 0.50) |")
    axes = draw_length_bias(rows).axes[0]
    (gate,) = [line for line in axes.get_lines() if line.get_label() == "gate"]
    assert list(gate.get_ydata()) == pytest.approx([0.35, 0.6])
    bars = axes.collections[0].get_segments()
    assert [[y for _, y in bar] for bar in bars] == [[0.2, 0.5], [0.2, 1.0]]
    assert {seed: len(group) for seed, group in rows_by_seed(rows).items()} == {1: 2, 2: 2}


def test_figure_draws_every_gate_and_the_prediction():
    axes = draw_length_bias(length_rows(SAMPLES, threshold=0.05, seed=1)).axes[0]
    drawn = {line.get_label(): list(line.get_ydata()) for line in axes.get_lines()}
    assert drawn["gate"] == [0.5, 1.0]
    assert drawn["1 - (1 - p)^T"] == pytest.approx([0.19, 1 - 0.9**8])


def test_token_level_figure_shows_a_ratio_of_900_under_ppo_clip_and_none_under_trm():
    kl_axes, ratio_axes = draw_token_level().axes
    ratios = {line.get_label(): np.asarray(line.get_ydata()) for line in ratio_axes.get_lines()}
    assert ratios[LABELS["ppo_clip"]][0] == pytest.approx(900)  # 0.9 / 0.001
    # Above a token KL of 0.05 nothing is kept: a gap, up to where pi_roll and pi_theta are close again.
    trm = ratios[LABELS["trm_max"]]
    assert np.isnan(trm[0])
    assert trm[-1] == pytest.approx(1.05, abs=0.01)  # docs/theory.md, section 12
    assert np.nanmin(trm) >= 1
    largest = {line.get_label(): np.asarray(line.get_ydata()) for line in kl_axes.get_lines()}
    assert np.array_equal(largest[LABELS["ppo_clip"]], largest[LABELS["no_mask"]])
    assert largest[LABELS["trm_max"]].max() <= 0.05


ROW = dataclasses.asdict(length_rows(SAMPLES, threshold=0.05, seed=1)[0])


def test_rows_come_back_from_their_file_as_they_were_written():
    rows = length_rows(SAMPLES, threshold=0.05, seed=1)
    content = json.dumps([dataclasses.asdict(row) for row in rows]).encode()
    assert parse_length_rows(content, "here") == rows


@pytest.mark.parametrize(
    "rows",
    [
        "not a list",
        [],
        [3],
        [{"seed": 1}],
        [ROW | {"seed": "1"}],
        [ROW | {"num_operands": 2.5}],
        [ROW | {"mean_length": None}],
        [ROW | {"mean_length": math.nan}],
        [ROW | {"predicted_rejection": 1.5}],
        [ROW | {"rejection": [0.5]}],
        [ROW | {"rejection": {"gate": "half"}}],
        [ROW, ROW | {"rejection": {"another": 0.5}}],
    ],
)
def test_a_damaged_file_of_rows_is_told_in_one_line_that_names_it(rows):
    with pytest.raises(InputError, match=r"^figures/table_2\.json: is no table of rejection .* make them again$"):
        parse_length_rows(json.dumps(rows).encode(), "figures/table_2.json")
    with pytest.raises(InputError, match="is no table of rejection"):
        parse_length_rows(json.dumps([ROW]).encode()[:-9], "figures/table_2.json")
