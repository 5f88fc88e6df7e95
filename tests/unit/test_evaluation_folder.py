import json
from dataclasses import replace

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from evaluation.generations import Generation, generation_file, read_generations, write_generations
from pipelines.evaluation_folder import EvaluationFolder, policy_fingerprint
from tests.unit.builders import TOKENIZER, tiny_policy
from trm_repro.errors import InputError
from trm_repro.policy import save_policy
from trm_repro.tasks import Problem

SETTINGS = {"task": "aime25", "top_p": 0.95, "num_samples": 2}
PROBLEM = Problem(id="aime25-I-01", prompt="Find it.", answer="70")
FIRST = Generation(
    problem_id="aime25-I-01",
    prompt="Find it.",
    gold="70",
    sample=0,
    seed=2**31 - 1,
    response="\\boxed{70} \u2713\n",
    num_tokens=5,
    finished=True,
)
ANSWERS = [FIRST, replace(FIRST, sample=1, response="", finished=False)]


@pytest.fixture
def folder(tmp_path):
    made = EvaluationFolder(tmp_path / "evaluation")
    made.prepare(SETTINGS, {"policy": "somewhere"})
    return made


def test_answers_come_back_as_they_were(folder):
    write_generations(folder.generations, ANSWERS)
    assert folder.answers_to(folder.generations, PROBLEM, 2) == ANSWERS
    assert [path.name for path in folder.generations.iterdir()] == ["aime25-I-01.parquet"]


def test_each_problem_has_a_file_of_its_own_however_its_answers_come(folder):
    other = [replace(answer, problem_id="b") for answer in ANSWERS]
    write_generations(folder.generations, [other[0], ANSWERS[0], other[1], ANSWERS[1]])
    assert read_generations(folder.generations / "b.parquet") == other
    assert folder.all_answers(folder.generations) == [*ANSWERS, *other]


@pytest.mark.parametrize("identifier", ["../../etc/passwd", "a/b", "", ".hidden", "x" * 300, "\u554f", "a b"])
def test_an_id_that_cannot_be_a_files_name_is_hashed(tmp_path, identifier):
    path = generation_file(tmp_path, identifier)
    assert path.parent == tmp_path
    assert path.name.startswith("id-")
    assert path != generation_file(tmp_path, identifier + "x")


def test_a_problem_that_was_not_done_has_no_answers_and_what_was_half_written_is_none(folder):
    write_generations(folder.generations, ANSWERS)
    file = folder.generations / "aime25-I-01.parquet"
    file.rename(file.with_name(file.name + ".partial"))
    assert folder.answers_to(folder.generations, PROBLEM, 2) is None
    assert folder.all_answers(folder.generations) == []


def test_the_same_settings_go_on_whatever_else_is_noted(folder):
    folder.prepare(SETTINGS, {"policy": "moved"})
    assert folder.read_settings() == {**SETTINGS, "about": {"policy": "moved"}}


@pytest.mark.parametrize(("name", "value"), [("top_p", 1.0), ("num_samples", 4), ("template", "chat")])
def test_other_settings_are_refused_and_named(folder, name, value):
    before = folder.settings_file.read_text()
    with pytest.raises(InputError, match=rf"other settings \({name} is .* there and {value} here\); choose another"):
        folder.prepare({**SETTINGS, name: value}, {})
    assert folder.settings_file.read_text() == before


@pytest.mark.parametrize(
    "problem", [replace(PROBLEM, prompt="Find them."), replace(PROBLEM, answer="7")], ids=["prompt", "gold"]
)
def test_answers_to_another_question_of_the_same_id_are_refused(folder, problem):
    write_generations(folder.generations, ANSWERS)
    with pytest.raises(InputError, match=r"aime25-I-01\.parquet: answers another question than problem aime25-I-01"):
        folder.answers_to(folder.generations, problem, 2)


def test_fewer_answers_than_asked_for_are_refused(folder):
    write_generations(folder.generations, ANSWERS[:1])
    with pytest.raises(InputError, match="or not 2 times"):
        folder.answers_to(folder.generations, PROBLEM, 2)


def test_a_damaged_or_foreign_file_is_named_with_the_mend(folder):
    write_generations(folder.generations, ANSWERS)
    file = folder.generations / "aime25-I-01.parquet"
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(InputError, match=r"aime25-I-01\.parquet: is not a readable .*; delete it, and `evaluate`"):
        folder.all_answers(folder.generations)
    pq.write_table(pa.table({"a": [1]}), file)
    with pytest.raises(InputError, match="does not hold a problem's answers; delete it"):
        folder.all_answers(folder.generations)


def test_answers_another_tool_wrote_again_are_read(folder):
    write_generations(folder.generations, ANSWERS)
    file = folder.generations / "aime25-I-01.parquet"
    pd.read_parquet(file).to_parquet(file)
    assert folder.all_answers(folder.generations) == ANSWERS


@pytest.mark.parametrize("text", ["", "[]", "{"])
def test_settings_that_cannot_be_read_are_refused(folder, text):
    folder.settings_file.write_text(text)
    with pytest.raises(InputError, match=r"settings\.json: is not a JSON object; expected a folder that"):
        folder.read_settings()


def test_a_second_process_is_kept_out(folder):
    with folder.locked(), pytest.raises(InputError, match="another process is evaluating into it"), folder.locked():
        pass


def test_scores_of_the_two_rules_have_files_of_their_own(folder, tmp_path):
    from evaluation.scores import grade_answers
    from trm_repro.tasks import DatasetTask

    for grading, expected in (("strict", [1.0, 0.0]), ("verl", [0.0, 0.0])):
        scored = grade_answers(DatasetTask(grading), ANSWERS)
        file = folder.write_scores({"grading": grading}, scored, grading, tmp_path / "out")
        assert json.loads(file.read_text()) == {"grading": grading}
        suffix = "" if grading == "strict" else "_verl"
        assert pq.read_table(tmp_path / "out" / f"answers{suffix}.parquet")["reward"].to_pylist() == expected
    assert len(list((tmp_path / "out").iterdir())) == 4


def test_a_policy_is_told_by_what_is_in_it_not_by_where_it_is(tmp_path):
    for name, seed in (("one", 0), ("same", 0), ("other", 1)):
        save_policy(tiny_policy(seed=seed), TOKENIZER, tmp_path / name)
    one, same, other = (policy_fingerprint(tmp_path / name) for name in ("one", "same", "other"))
    assert one == same != other
    (tmp_path / "same" / "notes.md").write_text("not read by anything")
    assert policy_fingerprint(tmp_path / "same") == one
    (tmp_path / "same" / "chat_template.jinja").write_text("{{ messages }}")
    assert policy_fingerprint(tmp_path / "same") != one


def test_a_large_weight_file_is_told_apart_by_any_of_its_parts(tmp_path):
    def fingerprint(change=None):
        data = bytearray(16 << 20)
        if change is not None:
            data[change] = 1
        (tmp_path / "model.safetensors").write_bytes(data)
        return policy_fingerprint(tmp_path)

    assert fingerprint() == fingerprint()
    assert len({fingerprint(), fingerprint(0), fingerprint((16 << 20) - 1)}) == 3
