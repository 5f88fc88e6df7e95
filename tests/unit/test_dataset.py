import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trm_repro.errors import InputError
from trm_repro.tasks import Problem, load_problems


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
        Problem(id="2", prompt="2+2?", answer="4"),
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
        ({"problem": "?"}, "row 2: expected an integer under one of answer, gold, label, got None"),
        ({"problem": "?", "answer": "pi"}, "row 2: expected an integer under one of answer, gold, label, got 'pi'"),
        ({"problem": "?", "answer": 3.5}, "row 2: expected an integer under one of answer, gold, label, got 3.5"),
        ({"problem": "?", "answer": True}, "row 2: expected an integer"),
    ],
)
def test_a_malformed_row_is_named_with_what_it_lacks(write, row, message):
    assert refusal(write({"problem": "ok", "answer": "1"}, row)).startswith(message)


def test_a_number_too_long_for_python_is_refused_like_any_malformed_row(write):
    refusal(write('{"problem": "?", "answer": ' + "7" * 5000 + "}"))


def test_two_problems_with_one_id_are_refused(write):
    rows = {"id": "1", "problem": "a", "answer": "1"}, {"id": 1, "problem": "b", "answer": "2"}
    assert refusal(write(*rows)) == "two problems have the same id"


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
    assert load_problems(path) == [Problem(id="1", prompt="1+1?", answer="2")]


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
