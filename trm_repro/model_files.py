"""A look at a saved model's files before anything is started on them."""

import re
from pathlib import Path

from safetensors import safe_open

from trm_repro.errors import InputError
from trm_repro.policy import EXPECTED_DIRECTORY, context_length, first_line, load_tokenizer

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def check_model_files(path: str | Path) -> None:
    """Look at a model's files without loading its weights; a name that is no local path is left to the loader.

    Args:
        path: directory or hub name.

    Raises:
        InputError: if the directory lacks a tokenizer, a configuration or whole safetensors files.
    """
    folder = Path(path)
    if folder.is_file():
        raise InputError(f"{path}: is a file; {EXPECTED_DIRECTORY}")
    if not folder.is_dir():
        if not HUB_NAME.fullmatch(str(path)):
            raise InputError(
                f"{path}: no such directory; {EXPECTED_DIRECTORY}, or a hub name such as Qwen/Qwen3-8B-Base"
            )
        return
    load_tokenizer(folder)
    context_length(folder)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise InputError(f"{path}: no model can be loaded (no .safetensors file); {EXPECTED_DIRECTORY}")
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                tensors.keys()
        except Exception as error:  # safetensors raises its own, and OSError
            raise InputError(f"{file}: is no whole safetensors file ({first_line(error)})") from error
