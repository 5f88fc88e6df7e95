"""`trm-repro config`: print a configuration in full, each key with its meaning."""

import argparse
import ast
import dataclasses
import importlib
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from pipelines.arguments import add_arm_argument, add_config_arguments, config_from
from pipelines.credentials import public_config
from trm_repro.config import RunConfig

HELP = "print a configuration in full, each key with its meaning; conf/miniature.yaml is its output"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_config_arguments(parser)
    add_arm_argument(parser)
    parser.add_argument(
        "--choices", action="store_true", help="print what the paper leaves open and what the configuration chooses"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    config = public_config(config_from(arguments))  # a password does not belong into a file
    sys.stdout.write(choices_text(config) if arguments.choices else config_text(config))
    return 0


def choices_text(config: RunConfig) -> str:
    """Tabulate what the paper leaves open with a configuration's values, as Markdown.

    Args:
        config: any.

    Returns:
        The table of docs/choices.md, where the configuration is the miniature.
    """
    from evaluation.choices import choices_table
    from evaluation.document import table_markdown

    values = {name: str(value) for name, value in _leaves(dataclasses.asdict(config))}
    return table_markdown(choices_table(values)) + "\n"


def _leaves(values: dict[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(value, prefix=f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def config_text(config: RunConfig) -> str:
    """Write a configuration as YAML in which every key stands under its meaning.

    Args:
        config: any.

    Returns:
        Text that `load_config` reads back unchanged.
    """
    lines = ["# A run's configuration, written out: every key with its meaning. See `trm-repro config --help`.", ""]
    for key in dataclasses.fields(config):
        value = getattr(config, key.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            lines += ["", f"# {meanings(type(value))['']}", f"{key.name}:"]
            for name, meaning in meanings(type(value)).items():
                lines += [f"  # {meaning}", f"  {name}: {_scalar(getattr(value, name))}"] if name else []
        else:
            lines += [f"# {meanings(RunConfig)[key.name]}", f"{key.name}: {_scalar(value)}"]
    return "\n".join(lines) + "\n"


@cache
def meanings(section: type) -> dict[str, str]:
    """Read what a section's keys mean from the strings under its fields.

    Args:
        section: a class of `trm_repro.config_sections`, or `RunConfig`.

    Returns:
        Meaning by key, the section's own under the empty key.
    """
    source = Path(importlib.import_module(section.__module__).__file__ or "").read_text(encoding="utf-8")
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name == section.__name__:
            found = {"": (ast.get_docstring(node) or "").splitlines()[0]}
            for field, text in zip(node.body, node.body[1:], strict=False):
                if (
                    isinstance(field, ast.AnnAssign)
                    and isinstance(text, ast.Expr)
                    and isinstance(field.target, ast.Name)
                ):
                    assert isinstance(text.value, ast.Constant)
                    found[field.target.id] = " ".join(str(text.value.value).split())
            return found
    raise LookupError(f"{section.__name__} is not defined in {section.__module__}")


def _scalar(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "[" + ", ".join(_scalar(item) for item in value) + "]"
    if isinstance(value, str) and (not value or set(value) & set(":#{}[],&*!|>'\"%@`\\") or value.strip() != value):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return str(value)
