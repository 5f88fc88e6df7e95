import argparse
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pipelines import bounds as command
from trm_repro.bounds import BOUNDS, Divergences, KnownLimits, every_bound, largest_delta, largest_length
from trm_repro.errors import InputError


def run(*arguments):
    parser = argparse.ArgumentParser()
    command.configure(parser)
    return command.run(parser.parse_args(arguments))


def run_json(capsys, *arguments):
    assert run(*arguments, "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_without_options_it_prints_table_1_beside_ours(capsys):
    assert run() == 0
    rows = {line[:30].strip(): line.split()[-6:] for line in capsys.readouterr().out.splitlines()}
    assert rows["classical"] == ["1677", "1,677.31", "838.66", "839", "838.66", "419.33"]
    assert rows["coupling"] == ["113.8", "113.84", "56.92", "79.9", "79.91", "39.95"]
    assert rows["mixed tv"] == ["8.2", "8.19", "4.10", "4.1", "4.10", "2.05"]
    assert rows["prefix adaptive"][0] == "-"  # not in the paper


def test_every_published_figure_of_table_1_is_met(capsys):
    for setting in run_json(capsys).values():
        for name, printed in setting["published"].items():
            value = setting["bounds"]["paper"][name]
            number = printed.removeprefix("<= ")
            decimals = len(number.partition(".")[2])
            if printed == number or name == "unified":
                assert f"{value:.{decimals}f}" == number, name
            else:
                assert value <= float(number) + 0.05, name


def test_the_calculator_says_what_is_above_one_and_above_trivial(capsys):
    payload = run_json(capsys, "--length", "4096", "--delta", "0.05")
    expected = every_bound(Divergences.at_most(4096, 0.05))
    assert set(payload["bounds"]["paper"]) == {*BOUNDS, "trivial", "unified"}
    for name, found in payload["bounds"]["paper"].items():
        assert found["value"] == expected[name]
        assert found["is_above_1"]
        assert found["is_above_trivial"] == (name != "trivial")
    assert payload["unified_below_1"]["paper"]["length"] == 6
    assert payload["unified_below_1"]["sharp"]["length"] == 10
    assert payload["unified_below_1"]["paper"]["delta"] == pytest.approx(2.8616e-6, rel=1e-4)
    assert payload["unified_below_1"]["sharp"]["delta"] == pytest.approx(5.7231e-6, rel=1e-4)


def test_the_calculator_uses_all_numbers_given(capsys):
    numbers = {"delta": 1e-4, "epsilon": 5e-3, "kl_seq": 0.01, "tv_seq": 0.05}
    options = [word for name, value in numbers.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    payload = run_json(capsys, "--length", "4096", *options, "--constants", "sharp")
    assert payload["inputs"] == {"length": 4096, **numbers}
    assert list(payload["bounds"]) == ["sharp"]
    assert payload["bounds"]["sharp"]["mixed_tv"]["value"] == pytest.approx(2.048)
    assert not payload["bounds"]["sharp"]["mixed_tv"]["is_above_trivial"]


def test_a_text_answer_holds_the_same_verdicts(capsys):
    assert run("--length", "100", "--delta", "1e-4", "--constants", "paper") == 0
    out = capsys.readouterr().out
    assert "length = 100, delta = 0.0001, epsilon = 0.00707107" in out
    rows = {line[:30].strip(): line.split()[-3:] for line in out.splitlines()}
    assert rows["classical"] == ["0.99", "no", "yes"]
    assert rows["coupling"][1:] == ["no", "yes"]
    assert rows["pinsker marginal kl"] == ["0.132", "no", "no"]
    assert "at this length for delta <" in out
    assert "at this delta and epsilon for length <=" in out


def test_either_length_or_delta_alone_is_enough(capsys):
    only_delta = run_json(capsys, "--delta", "0.05")
    assert only_delta["bounds"] == {}
    assert only_delta["unified_below_1"]["paper"] == {"length": 6}
    only_length = run_json(capsys, "--length", "4096")
    assert list(only_length["unified_below_1"]["paper"]) == ["delta"]
    assert only_length["inputs"]["delta"] is None  # infinite: unknown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--length", "8", "--delta", "-1"], "delta must be >= 0, got -1"),
        (["--delta", "nan"], "delta must be >= 0, got nan"),
        (["--length", "0"], "length must be a whole number >= 1, got 0"),
        (["--delta", "0.1", "--tv-seq", "1.5"], "tv_seq must be <= 1, got 1.5"),
        (["--length", "8", "--delta", "0.1", "--kl-seq", "3"], r"kl_seq must be <= length \* delta = 0.8, got 3"),
        (["--kl-seq", "1"], "--kl-seq and --tv-seq need --length, --delta or --epsilon beside them"),
        (["--length", "8", "--plot", "x.png"], "--plot needs --length and a finite --delta, or none of the numbers"),
        (["--verify", "0"], "--verify must be >= 1, got 0"),
        (["--verify", "5", "--length", "11"], "--length must be from 1 to 10 with --verify, got 11"),
        (["--verify", "5", "--delta", "1"], "--verify goes with --length, --constants, --seed and --json alone"),
    ],
)
def test_bad_values_are_input_errors(arguments, message):
    with pytest.raises(InputError, match=f"^{message}$"):
        run(*arguments)


def test_an_unwritable_plot_is_an_input_error(tmp_path):
    with pytest.raises(InputError, match="No such file or directory"):
        run("--plot", str(tmp_path / "missing" / "bounds.png"))


def test_verification_finds_no_violation_and_shows_progress_on_stderr(capsys):
    assert run("--verify", "300", "--seed", "1", "--json") == 0
    captured = capsys.readouterr()
    payload = json.loads(captured.out)
    assert "300/300" in captured.err
    for constants in ("paper", "sharp"):
        assert all(check["num_violations"] == 0 for check in payload["checks"][constants].values())
    assert payload["checks"]["sharp"]["coupling"]["worst_ratio"] <= 1 + 1e-9
    assert payload["reach"]["ppo_clip"]["flip_largest_opposed_ratio"] == pytest.approx(900)
    assert payload["reach"]["trm_max"]["share_max_kl_above"] == 0
    assert payload["reach"]["ppo_clip"]["share_same_max_kl"] > 0.9


def test_verification_repeats_with_its_seed_and_takes_a_length(capsys):
    first = run_json(capsys, "--verify", "40", "--length", "3", "--constants", "sharp")
    assert run_json(capsys, "--verify", "40", "--length", "3", "--constants", "sharp") == first
    assert run_json(capsys, "--verify", "40", "--length", "3", "--constants", "sharp", "--seed", "1") != first
    assert run("--verify", "40") == 0
    assert "40 random pairs of policies" in capsys.readouterr().out


def test_a_violation_makes_the_command_fail(monkeypatch, capsys):
    monkeypatch.setattr(command, "worst_error", lambda pairs: np.full(len(pairs.prompt_weights), 1e6))
    assert run("--verify", "2") == 1
    capsys.readouterr()


@pytest.mark.parametrize("numbers", [[], ["--length", "64", "--delta", "1e-3", "--epsilon", "0.01"]])
def test_the_plot_has_a_panel_for_length_and_one_for_delta(tmp_path, capsys, numbers):
    path = tmp_path / "bounds.svg"
    assert run("--plot", str(path), *numbers) == 0
    assert path.read_text().count('id="axes_') == 2
    capsys.readouterr()


def test_it_answers_without_heavy_imports_in_under_half_a_second():
    script = """
import argparse, sys, time
from pipelines import bounds
parser = argparse.ArgumentParser()
bounds.configure(parser)
bounds.run(parser.parse_args(["--length", "4096", "--delta", "1e-4"]))
heavy = {"torch", "matplotlib", "tqdm", "scipy", "pandas"} & set(sys.modules)
sys.exit(f"imported {heavy}" if heavy else f"took {time.process_time()} s" if time.process_time() > 0.5 else 0)
"""
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr


def doc_rows(title):
    """Cells of the table rows in one section of docs/theory.md."""
    text = (Path(__file__).parents[2] / "docs" / "theory.md").read_text()
    section = text.split(f". {title}\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("|")]
    return [row for row in rows if not row[0].startswith("--")]


def test_the_page_on_theory_prints_what_the_code_computes():
    rows = doc_rows("What a threshold guarantees")
    numbers = [row for row in rows if row[0].replace(",", "").isdigit()]
    assert len(numbers) == 10
    for row in numbers:
        length = int(row[0].replace(",", ""))
        divergences = Divergences.at_most(length, 0.05)
        paper, sharp = (every_bound(divergences, constants=constants) for constants in ("paper", "sharp"))
        expected = [paper["pinsker_marginal_kl"], sharp["pinsker_marginal_kl"], paper["trivial"], sharp["unified"]]
        expected += [largest_delta(length, KnownLimits(), constants=constants) for constants in ("paper", "sharp")]
        printed = [np.inf if cell == "any" else float(cell.replace(",", "")) for cell in row[1:]]
        assert printed == pytest.approx([float(value) for value in expected], rel=5e-3)
        assert paper["unified"] == paper["pinsker_marginal_kl"]
    deltas, *lengths = (row for row in rows if row[0] in ("delta", "paper", "sharp"))
    for constants, *printed in lengths:
        found = [largest_length(float(delta), KnownLimits(), constants=constants) for delta in deltas[1:]]
        assert [float(cell.replace(",", "")) for cell in printed] == found


def test_the_page_on_theory_prints_our_table_1(capsys):
    settings = run_json(capsys)
    rows = {row[0].lower().replace("(ours)", "").strip(): row[1:] for row in doc_rows("Table 1")[1:]}
    names = {
        "classical": "classical",
        "coupling": "coupling",
        "pinsker-marginal, kl, simplified": "simplified_pinsker_marginal_kl",
        "pinsker-marginal, tv, simplified": "simplified_pinsker_marginal_tv",
        "mixed, kl": "mixed_kl",
        "mixed, tv": "mixed_tv",
        "adaptive, hybrid, worst case": "adaptive_hybrid",
        "prefix-adaptive": "prefix_adaptive",
        "trivial": "trivial",
        "unified": "unified",
    }
    assert set(rows) == set(names)
    for title, cells in rows.items():
        for setting, (published, paper, sharp) in zip(("kl_only", "kl_and_tv"), (cells[:3], cells[3:]), strict=True):
            assert published == settings[setting]["published"].get(names[title], "")
            assert paper == f"{settings[setting]['bounds']['paper'][names[title]]:.2f}"
            assert sharp == f"{settings[setting]['bounds']['sharp'][names[title]]:.2f}"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("/dev/full", "is a device or pipe"),
        ("", "is a folder"),
        ("bounds", "ends in ''"),
        ("bounds.exe", "ends in '.exe'"),
    ],
)
def test_a_plot_goes_to_a_picture_file_alone(tmp_path, monkeypatch, name, reason):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=f"^--plot: .*{reason}.*; expected"):
        run("--plot", name)
    assert Path("/dev/full").is_char_device()
    assert list(tmp_path.iterdir()) == []


def test_a_plot_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    def fail(figure, partial, **kwargs):
        partial.write_text("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Figure, "savefig", fail)
    with pytest.raises(InputError, match=r"bounds.png cannot be written \(No space left on device\)"):
        run("--plot", str(tmp_path / "bounds.png"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("error")
def test_a_delta_near_the_largest_float_gives_infinite_bounds_and_no_warning(capsys):
    payload = run_json(capsys, "--length", "5", "--delta", "1e308")
    assert payload["inputs"]["kl_seq"] is None  # infinite
    sharp = payload["bounds"]["sharp"]
    assert sharp["unified"]["value"] == sharp["trivial"]["value"]
    assert run("--length", "5", "--delta", "1e308") == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seed", "-1", "--verify", "3"], "--seed must be a whole number >= 0, got -1"),
        (["--length", "5", "--delta", "0", "--plot", "x.png"], "--plot needs --delta above 0, got 0: its axis is"),
    ],
)
def test_seed_and_delta_are_refused_in_the_commands_own_words(arguments, message):
    with pytest.raises(InputError, match=f"^{message}"):
        run(*arguments)
