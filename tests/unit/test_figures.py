import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import PolyCollection
from PIL import Image

from evaluation.figures import COLOURS, FIGURES, arm_order, draw_figure, mean_interval, save_figures
from evaluation.outcomes import GAP, SCORE
from trm_repro.config import arm_names

FIGURE_1 = FIGURES[0]  # token_is and ppo_clip


def make_points(arms, seeds):
    """Gaps 0.1, 0.2, 0.3 at steps 1 to 3 and scores 0.4, 0.6 at steps 0 and 3, raised by 0.01 a seed."""
    rows = []
    for arm in arms:
        for seed in seeds:
            run = {"arm": arm, "seed": seed, "run_id": f"{arm}-{seed}"}
            rows += [run | {"metric": GAP, "step": step, "value": 0.1 * step + 0.01 * seed} for step in (1, 2, 3)]
            rows += [run | {"metric": SCORE, "step": step, "value": 0.4 + step / 15 + 0.01 * seed} for step in (0, 3)]
            rows += [run | {"metric": "time/step_seconds", "step": 1, "value": 2.0}]
    return pd.DataFrame(rows)


def draw(arms, seeds, plan=FIGURE_1):
    return draw_figure(make_points(arms, seeds), plan, score_name="the score").axes


def test_a_figure_has_the_gap_on_a_log_scale_and_the_score():
    gap_axes, score_axes = draw(["token_is", "ppo_clip"], [1])
    assert gap_axes.get_yscale() == "log"
    assert "PPL gap" in gap_axes.get_ylabel()
    assert score_axes.get_yscale() == "linear"
    assert score_axes.get_ylabel() == "the score"
    assert score_axes.get_ylim() == (0.0, 1.0)
    assert gap_axes.get_xlabel() == score_axes.get_xlabel() == "training step"


def test_below_five_seeds_every_run_is_a_curve_of_its_own_with_its_own_points():
    gap_axes, score_axes = draw(["token_is", "ppo_clip"], [1, 2, 3, 4])
    for axes, steps in ((gap_axes, [1, 2, 3]), (score_axes, [0, 3])):
        assert [line.get_label() for line in axes.lines] == [
            f"{arm}, seed {seed}" for arm in ("token_is", "ppo_clip") for seed in (1, 2, 3, 4)
        ]
        assert not axes.collections
        assert all(list(line.get_xdata()) == steps for line in axes.lines)
    assert list(gap_axes.lines[1].get_ydata()) == pytest.approx([0.12, 0.22, 0.32])
    assert list(score_axes.lines[5].get_ydata()) == pytest.approx([0.42, 0.62])
    assert len({line.get_linestyle() for line in gap_axes.lines[:4]}) == 4
    assert {line.get_color() for line in gap_axes.lines[:4]} == {COLOURS["token_is"]}


def test_five_seeds_make_a_mean_with_a_band():
    gap_axes, score_axes = draw(["token_is", "ppo_clip"], [0, 1, 2, 3, 4])
    for axes in (gap_axes, score_axes):
        assert [line.get_label() for line in axes.lines] == [
            "token_is, mean of 5 seeds",
            "ppo_clip, mean of 5 seeds",
        ]
        assert [isinstance(band, PolyCollection) for band in axes.collections] == [True, True]
    assert list(gap_axes.lines[0].get_ydata()) == pytest.approx([0.12, 0.22, 0.32])
    at_step_1 = [y for x, y in gap_axes.collections[0].get_paths()[0].vertices if x == 1.0]
    low, high = mean_interval(np.array([[0.1, 0.11, 0.12, 0.13, 0.14]]))
    assert (min(at_step_1), max(at_step_1)) == pytest.approx((low[0], high[0]))


def test_only_the_arms_of_the_figure_are_drawn():
    gap_axes, _ = draw(["token_is", "trm_max_0.1", "ppo_clip"], [1])
    assert [line.get_label() for line in gap_axes.lines] == ["token_is, seed 1", "ppo_clip, seed 1"]


@pytest.mark.parametrize("arms", [["trm_max_0.1"], ["ppo_clip", "trm_max_0.1"]])
def test_a_figure_with_fewer_than_two_of_its_arms_is_not_drawn(arms):
    assert draw_figure(make_points(arms, [1]), FIGURE_1, score_name="") is None


def test_files_of_a_figure_that_is_no_longer_drawn_are_removed_and_others_stay(tmp_path):
    for name in ("figure_1.png", "figure_1.csv", "mine.png"):
        (tmp_path / name).write_bytes(b"old")
    assert save_figures(make_points(["ppo_clip"], [1]), tmp_path, score_name="s") == []
    assert [file.name for file in tmp_path.iterdir()] == ["mine.png"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Figures of two seeds of three arms, of which one is in the control and none in figure 3."""
    points = make_points(["token_is", "ppo_clip", "trm_max_0.05"], [1, 2])
    folder = tmp_path_factory.mktemp("report") / "figures"
    return points, folder, save_figures(points, folder, score_name="s")


def test_figures_are_saved_as_png_pdf_and_csv_and_only_where_there_is_data(saved):
    _, folder, written = saved
    stems = ("figure_1", "figure_2")
    assert {path.name for path in written} == {f"{stem}.{suffix}" for stem in stems for suffix in ("png", "pdf", "csv")}
    assert set(folder.iterdir()) == set(written)
    assert (folder / "figure_1.pdf").read_bytes().startswith(b"%PDF")


def test_the_csv_beside_a_figure_holds_its_points_and_the_run_of_each(saved):
    points, folder, _ = saved
    read = pd.read_csv(folder / "figure_1.csv")
    expected = points[points.arm.isin(["token_is", "ppo_clip"]) & points.metric.isin([GAP, SCORE])]
    pd.testing.assert_frame_equal(read, expected.reset_index(drop=True))
    assert set(read.run_id) == {"token_is-1", "token_is-2", "ppo_clip-1", "ppo_clip-2"}


def test_the_images_name_the_runs_they_were_drawn_from(saved):
    with Image.open(saved[1] / "figure_1.png") as image:
        assert image.text["Description"] == "MLflow runs: ppo_clip-1, ppo_clip-2, token_is-1, token_is-2"


def test_the_interval_of_the_mean_is_the_bootstraps_by_the_binomial_formula():
    # One seed of five has 1, the others 0: a resample's mean is Binomial(5, 0.2) / 5. P(X <= 2) = 0.942 and
    # P(X <= 3) = 0.993, so that the 97.5% point is 3/5; P(X = 0) = 0.328, so that the 2.5% point is 0.
    low, high = mean_interval(np.array([[0.0, 0.0, 1.0, 0.0, 0.0]]), num_resamples=5000)
    assert (low[0], high[0]) == (0.0, pytest.approx(0.6))


def test_the_interval_of_many_seeds_is_the_normal_one():
    values = np.random.default_rng(1).normal(3.0, 2.0, size=(1, 400))
    low, high = mean_interval(values, num_resamples=4000)
    half_width = 1.96 * values.std() / np.sqrt(400)
    assert low[0] == pytest.approx(values.mean() - half_width, abs=0.06 * half_width)
    assert high[0] == pytest.approx(values.mean() + half_width, abs=0.06 * half_width)


def test_the_interval_of_seeds_that_agree_is_a_point_and_steps_are_kept_apart():
    low, high = mean_interval(np.array([[0.5] * 6, [2.0] * 6, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]]))
    assert low[:2].tolist() == high[:2].tolist() == [0.5, 2.0]
    assert 1.0 < low[2] < 3.5 < high[2] < 6.0


def test_the_interval_is_the_same_every_time_and_belongs_to_its_seed():
    values = np.random.default_rng(0).normal(size=(4, 7))
    first, again, other = mean_interval(values), mean_interval(values), mean_interval(values, seed=1)
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_arms_are_ordered_as_in_the_figures_and_unknown_ones_come_last():
    assert arm_order(["mine", "trm_avg_0.001", "token_is", "ppo_clip"]) == [
        "token_is",
        "ppo_clip",
        "trm_avg_0.001",
        "mine",
    ]


def test_arms_of_ones_own_come_in_one_order_whatever_order_they_are_given_in():
    assert arm_order(["mine", "another", "ppo_clip"]) == arm_order(["another", "ppo_clip", "mine"])


def test_every_arm_of_a_figure_can_be_run_and_has_a_colour_of_its_own():
    drawn = {arm for plan in FIGURES for arm in plan.arms}
    assert drawn <= set(arm_names())
    assert drawn <= set(COLOURS)
    assert len(set(COLOURS.values())) == len(COLOURS)
