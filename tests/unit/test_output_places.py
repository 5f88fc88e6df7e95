"""Where a command writes is tried before its work begins, and nothing is left there."""

from pathlib import Path

import pytest

from pipelines import session
from pipelines.cli import main
from trm_repro.errors import InputError
from trm_repro.parquet_files import check_folder


def test_a_folder_that_can_be_made_is_not_made_yet(tmp_path: Path):
    check_folder(tmp_path / "runs" / "deeper")
    check_folder(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_where_no_file_can_be_made_is_refused_even_for_root():
    with pytest.raises(InputError, match=r"^/proc: no file can be made there \(.+\); choose another folder$"):
        check_folder(Path("/proc/trm/deeper"))


@pytest.mark.parametrize(
    "words",
    [
        ["train", "output.dir=/proc/trm"],
        ["rollout", "--out", "/proc/trm"],
        ["update", "--in", "step_00000.parquet", "--out", "/proc/trm"],
        ["mask", "--in", "step_00000.parquet", "--out", "/proc/trm/masks.parquet"],
    ],
    ids=lambda words: words[0],
)
def test_a_command_that_cannot_write_says_so_before_it_works(words, monkeypatch, capsys):
    monkeypatch.setattr(session, "set_threads", lambda number: pytest.fail("the work has begun"))
    assert main(words) == 2
    assert "/proc: no file can be made there (" in capsys.readouterr().err
