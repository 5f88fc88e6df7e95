from xml.etree import ElementTree

import pytest

from evaluation.figures import FIGURES
from evaluation.report_figures import BOUNDS, KEPT, arm_pictures, plan_pictures
from evaluation.themes import DARK_PAGE, DARK_TEXT, light_and_dark
from tests.unit.test_figures import make_points

FIGURE_1 = FIGURES[0]


def test_both_panels_are_described_and_written_where_markdown_finds_them(tmp_path):
    folder = tmp_path / "figures"
    gap, score = plan_pictures(make_points(["token_is"], [0, 2]), FIGURE_1, folder, score_name="the score")
    assert (gap.path, score.path) == ("figures/figure_1_gap.svg", "figures/figure_1_score.svg")
    assert (folder / "figure_1_gap.svg").read_bytes() == gap.image
    # gaps 0.1 and 0.12 at step 1, 0.3 and 0.32 at step 3; scores 0.4 and 0.42 to 0.6 and 0.62
    assert "token_is from 0.11 to 0.31 over 2 seeds" in gap.alt
    assert "the score against the training step. token_is from 0.41 to 0.61 over 2 seeds" in score.alt


def test_a_figure_without_any_of_its_arms_has_no_picture(tmp_path):
    assert plan_pictures(make_points(["trm_max_0.1"], [0]), FIGURE_1, tmp_path, score_name="") == []


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
    (picture, _) = plan_pictures(make_points(["token_is"], [0]), FIGURE_1, tmp_path, score_name="s")
    light, dark = picture.image.decode(), picture.dark_image.decode()
    assert "#ffffff" in light
    assert "#ffffff" not in dark
    assert "#000000" not in dark
    assert DARK_PAGE in dark
    assert ElementTree.fromstring(dark).get("fill") == DARK_TEXT
    assert len(ElementTree.fromstring(dark).findall(".//*")) == len(ElementTree.fromstring(light).findall(".//*"))


def test_the_same_figure_is_the_same_file():
    from evaluation.token_level import draw_token_level

    assert light_and_dark(draw_token_level()) == light_and_dark(draw_token_level())
