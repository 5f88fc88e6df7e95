from dataclasses import replace
from xml.etree import ElementTree

import pytest
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from evaluation.figures import FIGURES
from evaluation.report_figures import BOUNDS, KEPT, _few, arm_pictures, plan_pictures, survival_picture
from evaluation.themes import DARK_PAGE, DARK_TEXT, light_and_dark
from tests.unit.test_figures import make_points
from tests.unit.test_report import outcome

FIGURE_1 = FIGURES[0]


def test_both_panels_are_described_and_written_where_markdown_finds_them(tmp_path):
    folder = tmp_path / "figures"
    gap, score = plan_pictures(make_points(["token_is", "ppo_clip"], [0, 2]), FIGURE_1, folder, score_name="the score")
    assert (gap.path, score.path) == ("figures/figure_1_gap.svg", "figures/figure_1_score.svg")
    assert (folder / "figure_1_gap.svg").read_bytes() == gap.image
    # gaps 0.1 and 0.12 at step 1, 0.3 and 0.32 at step 3; scores 0.4 and 0.42 to 0.6 and 0.62
    assert "token_is from 0.11 to 0.31 over 2 seeds" in gap.alt
    assert "the score against the training step. token_is from 0.41 to 0.61 over 2 seeds" in score.alt


@pytest.mark.parametrize("arms", [["trm_max_0.1"], ["token_is", "trm_max_0.1"]])
def test_a_figure_with_fewer_than_two_of_its_arms_has_no_picture_and_leaves_no_old_one(tmp_path, arms):
    (tmp_path / "figure_1_gap.svg").write_bytes(b"old")
    assert plan_pictures(make_points(arms, [0]), FIGURE_1, tmp_path, score_name="") == []
    assert not list(tmp_path.iterdir())


def collapses(arm, steps):
    """Runs of 60 steps, a seed each: the step at which it collapsed, None for not, "?" for cannot say."""
    return [
        outcome(arm, seed=seed)
        if step == "?"
        else replace(outcome(arm, seed=seed), has_collapsed=step is not None, collapse_step=step)
        for seed, step in enumerate(steps)
    ]


def test_survival_is_drawn_for_arms_of_enough_seeds_that_can_say(tmp_path):
    runs = [
        *collapses("ppo_clip", [10, 20, None, None, 20]),  # 3 of 5 collapse: 0.4 stay
        *collapses("token_is", [None] * 5),
        *collapses("trm_avg_0.001", [10, 10, 10, 10, "?"]),
    ]
    picture = survival_picture(runs, tmp_path, min_seeds=5)
    assert picture.path == f"{tmp_path.name}/survival.svg"
    assert picture.alt.endswith("training step. token_is 1 at the end; ppo_clip 0.4 at the end.")
    ElementTree.fromstring((tmp_path / "survival.svg").read_bytes())


def test_survival_is_not_drawn_from_few_seeds_and_leaves_no_old_picture(tmp_path):
    (tmp_path / "survival.svg").write_bytes(b"old")
    assert survival_picture(collapses("ppo_clip", [10, None, 20, 5]), tmp_path, min_seeds=5) is None
    assert not list(tmp_path.iterdir())


def test_a_legend_of_many_arms_has_an_entry_for_each(tmp_path):
    runs = [run for number in range(8) for run in collapses(f"arm_{number}", [None] * 5)]
    labels = [Line2D([], [], label=run.arm) for run in runs[::5]]
    assert _few(labels) == labels
    assert survival_picture(runs, tmp_path, min_seeds=5).alt.count("1 at the end") == 8


def test_each_arm_with_the_metrics_has_a_picture_in_the_order_of_the_figures(tmp_path):
    points = make_points(["trm_avg_0.001", "ppo_clip"], [0, 1]).replace("divergence/ppl_gap", "mask/kept_long_fraction")
    pictures = arm_pictures(points, KEPT, tmp_path, name="kept", title="Share kept")
    assert [picture.path.rpartition("/")[2] for picture in pictures] == ["kept_1.svg", "kept_2.svg"]
    assert ["under ppo_clip" in pictures[0].alt, "under trm_avg_0.001" in pictures[1].alt] == [True, True]
    assert arm_pictures(points, BOUNDS, tmp_path, name="bounds", title="Bounds") == []


@pytest.mark.parametrize("name", ["a$b$c", "<b>&--", "_x", "$"])
def test_any_name_of_an_arm_can_be_drawn(tmp_path, name):
    points = make_points([name], [0]).replace("divergence/ppl_gap", "mask/kept_long_fraction")
    (picture,) = arm_pictures(points, KEPT, tmp_path, name="kept", title="t")
    ElementTree.fromstring(picture.image)


def test_the_dark_form_has_light_letters_on_a_dark_page_and_nothing_black(tmp_path):
    (picture, _) = plan_pictures(make_points(["token_is", "ppo_clip"], [0]), FIGURE_1, tmp_path, score_name="s")
    light, dark = picture.image.decode(), picture.dark_image.decode()
    assert "#ffffff" in light
    assert "#ffffff" not in dark
    assert "#000000" not in dark
    assert DARK_PAGE in dark
    assert ElementTree.fromstring(dark).get("fill") == DARK_TEXT
    assert len(ElementTree.fromstring(dark).findall(".//*")) == len(ElementTree.fromstring(light).findall(".//*"))


def test_the_same_figure_is_the_same_file():
    def figure() -> Figure:
        drawn = Figure()
        axes = drawn.subplots()
        axes.plot([1.0, 2.0], label="score")
        axes.fill_between([0, 1], [0.5, 1.5], [1.5, 2.5])  # clipped, and clips have names
        axes.legend()
        return drawn

    assert light_and_dark(figure()) == light_and_dark(figure())
