"""The command line: `trm-repro COMMAND ...`. Commands are imported when they are called."""

import argparse
import importlib
import os
import sys
from typing import NoReturn

from trm_repro import __version__
from trm_repro.errors import FaultError, InputError

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read when torch is loaded: no warnings of its C++ parts

COMMANDS = {
    "reproduce": "run every arm with every seed, then draw the figures and write the report",
    "train": "train one arm with one seed",
    "report": "draw figures and write the report from MLflow",
    "compare": "print runs' curves side by side, from any MLflow store",
    "sync": "send to MLflow the points that wait in a folder's spools",
    "study": "run the cells of a study, each a reproduce of its own, and collect what every run did",
    "audit": "measure the mismatch in anybody's rollout dump, and what each gate would keep",
    "regate": "replay a stored run under any gate: acceptance, gradient mass, bias, per step",
    "lengths": "measure how each gate's rejection grows with response length (the paper's Table 2)",
    "bounds": "print the paper's bounds and ours, Table 1 among them",
    "evaluate": "score a policy on held-out problems or on a file such as AIME25",
    "grade": "grade responses in a file of {gold, response} lines, and print why",
    "rollout": "sample one step's rollouts from a policy and write a shard",
    "mask": "score a shard with a policy and write the masks of its first update",
    "update": "train one step on a shard and write masks and the new policy",
    "config": "print a configuration in full, each key with its meaning",
    "plan": "print memory, operations, storage and time of a run on GPUs before it is started",
    "doctor": "check GPUs, versions, disk, memory, hub, tracking server and ports",
}


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, as all others are."""

    def error(self, message: str) -> NoReturn:
        """Refuse the arguments."""
        raise InputError(f"{message}; see {self.prog} --help")


READER_GONE = 141
"""As a shell reports a process that SIGPIPE ended."""


def main(argv: list[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: arguments; those of the process when None.

    Returns:
        0 when done, 1 when a run had to stop, 2 for bad input.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    parser = Parser(
        prog="trm-repro",
        description="Reproduce, audit and build on Trust Region Masking (arXiv 2512.23075).",
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"trm-repro {__version__}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help=_command_list())
    command = ""
    try:
        command = str(parser.parse_args(words[:1]).command)
        module = importlib.import_module(f"pipelines.{command}")
        command_parser = Parser(prog=f"trm-repro {command}", description=module.HELP)
        module.configure(command_parser)
        code = int(module.run(command_parser.parse_intermixed_args(words[1:])))
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader, such as head, has gone; the interpreter would flush once more at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_GONE
    except InputError as error:
        return _fail(str(error), 2)
    except OSError as error:
        if error.filename is None:
            raise
        return _fail(f"{error.filename}: {error.strerror}", 2)
    except FaultError as error:
        return _fail(f"stopped: {error}", 1)
    except KeyboardInterrupt:
        goes_on = command in ("reproduce", "train", "evaluate")
        return _fail("interrupted" + ("; the same command goes on from the last finished step" * goes_on), 130)


def _fail(message: str, code: int) -> int:
    sys.stderr.write(f"trm-repro: {' '.join(message.split())}\n")
    return code


def _command_list() -> str:
    width = max(map(len, COMMANDS))
    return "\n".join(["one of", *(f"{name:<{width}}  {meaning}" for name, meaning in COMMANDS.items())])


if __name__ == "__main__":
    sys.exit(main())
