import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trm_repro.errors import InputError
from trm_repro.tasks import DatasetReport, DatasetTask, Problem, ProblemSource, Response
from trm_repro.tasks import load_problems as load_from_source


def load_problems(path):
    return load_from_source(ProblemSource(file=path))[0]


@pytest.fixture
def write(tmp_path):
    def write_lines(*rows, name="problems.jsonl"):
        path = tmp_path / name
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        return path

    return write_lines


def refusal(path):
    with pytest.raises(InputError) as raised:
        load_problems(path)
    message = str(raised.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return message.removeprefix(f"{path}: ")


def test_problems_are_read_in_order_under_any_of_the_known_names(write):
    path = write(
        {"id": 7, "problem": "1+1?", "answer": "2"},
        {"question": "2+2?", "gold": 4},
        "",
        {"prompt": "0-3?", "label": "-03", "id": "last"},
    )
    assert load_problems(path) == [
        Problem(id="7", prompt="1+1?", answer="2"),
        Problem(id="question-30ad205245cd", prompt="2+2?", answer="4"),
        Problem(id="last", prompt="0-3?", answer="-3"),
    ]


def test_parquet_and_jsonl_give_the_same_problems(write, tmp_path):
    rows = [{"id": "a", "problem": "1+1?", "answer": 2}, {"id": "b", "problem": "\u554f?", "answer": 1024}]
    parquet = tmp_path / "problems.parquet"
    pq.write_table(pa.Table.from_pylist(rows), parquet)
    assert load_problems(parquet) == load_problems(write(*rows))


def test_an_answer_of_zero_is_an_answer(write):
    assert load_problems(write({"problem": "1-1?", "answer": 0}))[0].answer == "0"


def test_a_missing_file_is_named(tmp_path):
    assert refusal(tmp_path / "none.jsonl") == "no such file; expected problems as .jsonl or .parquet"


def test_a_file_without_problems_is_refused(write):
    assert refusal(write("", "")) == "has no problems"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{not json", "line 2 is not a JSON object"),
        ("[" * 100_000, "line 2 is not a JSON object"),
        ("[1, 2]", "row 2: expected an object, got list"),
        ({"answer": "3"}, "row 2: expected text under one of problem, question, prompt, found keys ['answer']"),
        ({"problem": "  ", "answer": "3"}, "row 2: expected text under one of"),
        ({"problem": 5, "answer": "3"}, "row 2: expected text under one of"),
        (
            {"problem": "?"},
            "row 2: expected an integer under one of answer, gold, label, solution, reward_model.ground_truth, got N",
        ),
        ({"problem": "?", "answer": "pi"}, "row 2: expected an integer under one of answer"),
        ({"problem": "?", "answer": 3.5}, "row 2: expected an integer"),
        ({"prompt": [{"role": "system", "content": "hi"}], "answer": 1}, "row 2: expected text under one of"),
        ({"prompt": [{"role": "user", "content": "a"}] * 2, "answer": 1}, "row 2: expected text under one of"),
        ({"problem": "?", "reward_model": {"ground_truth": "x+1"}}, "row 2: expected an integer"),
        ({"problem": "?", "answer": True}, "row 2: expected an integer"),
    ],
)
def test_a_malformed_row_is_named_with_what_it_lacks(write, row, message):
    assert refusal(write({"problem": "ok", "answer": "1"}, row)).startswith(message)


def test_a_number_too_long_for_python_is_refused_like_any_malformed_row(write):
    refusal(write('{"problem": "?", "answer": ' + "7" * 5000 + "}"))


def test_different_questions_with_one_id_keep_it_and_are_told_apart_whatever_their_order(write):
    rows = [{"id": "1", "problem": "a", "answer": "1"}, {"id": 1, "problem": "b", "answer": "2"}]
    forward = {problem.prompt: problem.id for problem in load_problems(write(*rows))}
    backward = {problem.prompt: problem.id for problem in load_problems(write(*reversed(rows)))}
    assert forward == backward
    assert len(set(forward.values())) == 2
    assert all(identifier.startswith("1-") for identifier in forward.values())


def test_an_id_made_from_a_question_does_not_depend_on_its_row_or_white_space(write):
    first = load_problems(write({"problem": "1+1 = ?", "answer": 2}))[0]
    second = load_problems(write({"problem": "0?", "answer": 0}, {"problem": " 1+1  =\n?", "answer": 2}))[1]
    assert first.id == second.id


def test_questions_that_differ_in_white_space_only_are_one_and_the_first_stays(write):
    rows = [("a", "1 +\t1 ?", 2), ("b", "1 + 1\n?", "02"), ("c", "1 + 2 ?", 3)]
    source = ProblemSource(file=write(*({"id": i, "problem": p, "answer": a} for i, p, a in rows)))
    problems, report = load_from_source(source)
    assert [(problem.id, problem.prompt) for problem in problems] == [("a", "1 +\t1 ?"), ("c", "1 + 2 ?")]
    assert (report.num_rows, report.num_unique, report.num_conflicting, report.num_kept) == (3, 2, 0, 2)


def test_a_question_with_two_answers_is_dropped_wherever_they_stand_and_counted(write):
    rows = [("q", 1), ("r", 5), ("q ", 1), ("q", 2), ("q", 1)]
    problems, report = load_from_source(ProblemSource(file=write(*({"problem": p, "answer": a} for p, a in rows))))
    assert [problem.prompt for problem in problems] == ["r"]
    assert (report.num_rows, report.num_unique, report.num_conflicting, report.num_kept) == (5, 2, 1, 1)
    assert str(report).endswith(": 5 rows, 2 different questions, 1 dropped for conflicting answers, 1 kept")


def test_a_report_counts_all_that_is_dropped():
    counts = {"num_rows": 90, "num_unique": 20, "num_conflicting": 3, "num_held_out": 4, "num_over_length": 5}
    report = DatasetReport(source="x", **counts)
    assert report.num_kept == 8
    assert "4 dropped because they are evaluated on, 5 dropped for prompts over the limit, 8 kept" in str(report)


def test_a_file_whose_rows_all_disagree_is_refused(write):
    path = write({"problem": "q", "answer": 1}, {"problem": "q", "answer": 2})
    assert refusal(path) == "has no problems whose rows agree on the answer"


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        ({"answer": "033"}, "33"),
        ({"answer": 33}, "33"),
        ({"answer": "336^\\circ"}, "336"),
        ({"answer": "$336^{\\circ}$"}, "336"),
        ({"solution": "\\boxed{204}"}, "204"),
        ({"answer": "204", "solution": "We find that ... so it is 7."}, "204"),
        ({"answer": "12345678901234567890123"}, "12345678901234567890123"),
        ({"answer": 12345678901234567890123}, "12345678901234567890123"),
        ({"answer": None, "reward_model": {"ground_truth": "-34", "style": "rule"}}, "-34"),
    ],
)
def test_answers_as_data_sets_write_them(write, row, answer):
    assert load_problems(write({"question": "?"} | row))[0].answer == answer


def test_a_row_of_daposs_schema_gives_the_bare_question_and_its_index(write):
    content = (
        "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
        "$Answer (without quotes) where $Answer is the answer to the problem.\n\nWhat is 1+1?\n\nRemember to put your "
        'answer on its own line after "Answer:".'
    )
    row = {
        "data_source": "math_dapo",
        "prompt": [{"content": content, "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": "2", "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": "9a9b"},
    }
    assert load_problems(write(row)) == [Problem(id="9a9b", prompt="What is 1+1?", answer="2")]


def test_a_folder_laid_out_like_a_hub_repository_is_read_by_split(tmp_path):
    for split, answer in (("train", 1), ("test", 2)):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps({"problem": split, "answer": answer}) + "\n")
    problems, report = load_from_source(ProblemSource(name=str(tmp_path), split="test"))
    assert [(problem.prompt, problem.answer) for problem in problems] == [("test", "2")]
    assert str(report).startswith(f"{tmp_path} (test): 1 rows")


def test_a_split_that_is_not_there_is_named_with_those_that_are(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"problem": "a", "answer": 1}\n')
    with pytest.raises(InputError, match=r"Bad split: test\. Available splits: \['train'\].*set task\.file=FILE"):
        load_from_source(ProblemSource(name=str(tmp_path), split="test"))


def test_without_a_connection_one_line_names_the_ways_out(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    source = ProblemSource(name="math-ai/aime25", split="test", revision="v1", file_mend="--data FILE")
    with pytest.raises(InputError) as raised:
        load_from_source(source)
    message = str(raised.value)
    assert message.startswith("math-ai/aime25@v1 (test): cannot be read from the hub (")
    assert message.endswith("; unset HF_HUB_OFFLINE, or read a local .jsonl or .parquet file: --data FILE")
    assert "\n" not in message


def test_name_revision_subset_and_split_reach_the_hub_and_rows_come_one_at_a_time(monkeypatch):
    import datasets

    calls, taken = [], []

    def load_dataset(path, **options):
        calls.append((path, options))
        for number in range(1_000_000_000):
            taken.append(number)
            yield {"problem": f"{number}?", "answer": "x" if number == 3 else number}

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(InputError, match="row 4: expected an integer"):
        load_from_source(ProblemSource(name="a/b", revision="abc", subset="II", split="test"))
    assert calls == [("a/b", {"streaming": True, "split": "test", "revision": "abc", "name": "II"})]
    assert taken == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("grading", "text", "finished", "reward"),
    [
        ("strict", r"\boxed{7}", True, 1.0),
        ("strict", r"\boxed{7}", False, 0.0),
        ("verl", r"\boxed{7}", True, 0.0),
        ("verl", "Answer: 7", False, 1.0),
    ],
)
def test_the_grading_mode_decides_what_counts_as_an_answer(grading, text, finished, reward):
    problem = Problem(id="1", prompt="?", answer="7")
    assert DatasetTask(grading).grade(problem, Response(text=text, finished=finished)).reward == reward


def test_the_published_dapo_rows_give_17188_questions_of_which_12_have_two_answers(test_data):
    problems, report = load_from_source(ProblemSource(file=test_data / "dapo_math_17k.parquet"))
    assert (report.num_rows, report.num_unique, report.num_conflicting) == (17917, 17188, 12)
    assert len(problems) == report.num_kept == 17176
    assert len({problem.id for problem in problems}) == 17176
    assert problems[0].id == "9a9b6eb4-a1cb-49d1-8c1e-62eaf2f74079"
    assert problems[0].prompt.startswith("In triangle $ABC$, ")
    assert max(len(problem.answer.lstrip("-")) for problem in problems) == 23
    assert not any("Remember to put your answer" in problem.prompt for problem in problems)


def test_a_hundredfold_repetition_adds_rows_and_no_questions(test_data):
    _, report = load_from_source(ProblemSource(file=test_data / "dapo_math_17k_dup100.parquet"))
    assert (report.num_rows, report.num_unique, report.num_conflicting) == (4600, 42, 2)


def test_bytes_that_are_no_text_are_refused(tmp_path):
    path = tmp_path / "problems.jsonl"
    path.write_bytes(b"\xff\xfe\x00")
    assert refusal(path) == "is not UTF-8 text; expected .jsonl or .parquet"


def test_a_damaged_parquet_file_is_refused(tmp_path):
    path = tmp_path / "problems.parquet"
    pq.write_table(pa.table({"problem": ["?"] * 50, "answer": [1] * 50}), path)
    path.write_bytes(path.read_bytes()[:-20])
    assert refusal(path).startswith("is not a readable Parquet file (")


@pytest.mark.parametrize("year", ["24", "25"])
def test_aime_is_thirty_problems_with_answers_below_a_thousand(test_data, year):
    problems = load_problems(test_data / f"aime{year}.jsonl")
    assert len({problem.prompt for problem in problems}) == 30
    assert all(0 <= int(problem.answer) <= 999 for problem in problems)


def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path):
    path = tmp_path / "problems.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps({"problem": "1+1?", "answer": 2}).encode() + b"\n")
    assert [(problem.prompt, problem.answer) for problem in load_problems(path)] == [("1+1?", "2")]


@pytest.mark.parametrize(("answer", "expected"), [("2.0", "2"), ("-7.0", "-7"), ("1e3", "1000"), ("-0.0", "0")])
def test_a_number_that_is_a_whole_one_is_an_integer_however_it_is_written(write, answer, expected):
    assert load_problems(write(f'{{"problem": "?", "answer": {answer}}}'))[0].answer == expected


@pytest.mark.parametrize("answer", ["2.5", "1e300", "NaN", "Infinity", "9007199254740994.0"])
def test_a_number_that_is_not_surely_a_whole_one_is_refused(write, answer):
    assert "expected an integer" in refusal(write(f'{{"problem": "?", "answer": {answer}}}'))


def test_whole_numbers_in_a_parquet_column_of_floats_are_integers(tmp_path):
    path = tmp_path / "problems.parquet"
    pq.write_table(pa.table({"problem": ["a", "b"], "answer": [2.0, 336.0]}), path)
    assert [problem.answer for problem in load_problems(path)] == ["2", "336"]
