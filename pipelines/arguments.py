"""Arguments that every command on a configuration shares."""

import argparse

from trm_repro.config import RunConfig, load_arm, load_config
from trm_repro.errors import InputError


def add_config_arguments(parser: argparse.ArgumentParser, *, default: str = "the miniature") -> None:
    """Add ``[CONFIG ...] [key=value ...]``; ``default`` names what the command takes without any."""
    parser.add_argument(
        "settings",
        nargs="*",
        metavar="CONFIG | key=value",
        help=f"YAML files and overrides, such as conf/smoke.yaml update.learning_rate=0.1; default: {default}",
    )


def add_arm_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--arm NAME``."""
    parser.add_argument("--arm", help="an arm of conf/arms, whose keys win over the files'")


def split_settings(settings: list[str]) -> tuple[list[str], list[str]]:
    """Tell files from ``key=value``.

    Args:
        settings: as typed.

    Returns:
        Files and overrides.

    Raises:
        InputError: if a word is neither.
    """
    files, overrides = [], []
    for setting in settings:
        if setting.endswith((".yaml", ".yml")) and "=" not in setting:
            files.append(setting)
        elif "=" in setting:
            overrides.append(setting)
        else:
            raise InputError(f"{setting!r} is neither a .yaml file nor key=value")
    return files, overrides


def config_from(arguments: argparse.Namespace) -> RunConfig:
    """Load the configuration a command was given, with ``--arm`` where it has one."""
    files, overrides = split_settings(arguments.settings)
    arm = getattr(arguments, "arm", None)
    return load_config(files, overrides) if arm is None else load_arm(arm, files, overrides)
