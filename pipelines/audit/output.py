"""The audit's files, written whole or not at all."""

import json
import math
from pathlib import Path
from typing import Any

from trm_repro.errors import InputError


def check_outputs(*paths: Path | None, inputs: list[Path] | None = None) -> None:
    """Refuse output paths that cannot be written, before the data are read.

    Args:
        paths: to write; None where nothing is.
        inputs: files that are read, which no output may replace.

    Raises:
        InputError: if a path is a folder, lies in none, is an input or a shard or mask file of ours, or is given twice.
    """
    from pipelines.audit.own_shards import FileKind, kind_of

    taken = {path.resolve() for path in inputs or []}
    for path in paths:
        if path is not None and path.is_dir():
            raise InputError(f"{str(path)!r} is a folder; expected the name of a file to write")
        if path is not None and not path.resolve().parent.is_dir():
            raise InputError(f"{path.parent}: no such folder; make it first")
        if path is not None:
            if path.resolve() in taken or kind_of(path) is not FileKind.OTHER:
                raise InputError(f"{path}: is a file to read or another output; give each output a name of its own")
            taken.add(path.resolve())


def write_outputs(payload: dict[str, Any], *, json_path: Path | None, html_path: Path | None) -> list[Path]:
    """Write what was asked for.

    Args:
        payload: of the audit.
        json_path: for JSON, or None.
        html_path: for the page, or None.

    Returns:
        The files written.
    """
    from pipelines.run_directory import write_atomically

    if json_path is not None:
        write_atomically(json_path, json.dumps(plain(payload), indent=1, allow_nan=False) + "\n")
    if html_path is not None:
        from pipelines.audit.page import page_html

        write_atomically(html_path, page_html(payload))
    return [path for path in (json_path, html_path) if path is not None]


def printable(value: Any) -> Any:  # noqa: ANN401
    """Escape in every text, names included, what no encoding can write: halves of characters out of a JSON file."""
    if isinstance(value, dict):
        return {printable(name): printable(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [printable(entry) for entry in value]
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


def plain(value: Any) -> Any:  # noqa: ANN401
    """Turn NaN and infinity, which JSON cannot say, into null; everything else stays."""
    if isinstance(value, dict):
        return {str(name): plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
