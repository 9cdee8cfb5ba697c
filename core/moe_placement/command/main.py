"""The command `moe-plan`: reads flags and files, calls the algorithms, shows what came out."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import TextIO

from moe_placement.command import convert, diff, explain, plan, repair, replay, score
from moe_placement.command.flags import Parser
from moe_placement.command.usage import UsageError

PROGRAM = "moe-plan"
DESCRIPTION = """\
Plan where the experts of a Mixture-of-Experts model live: balanced to the bound, moving little.

From measured loads (tokens per layer and expert) it decides how many copies each expert gets, on
which ranks, and which share of its tokens each copy serves. These are the functions that the
operator and `moe-worker local` use, on files.
"""
EXAMPLES = """\
examples:
  moe-plan plan --load L.npy --ranks 32 --slots-per-rank 9 --output P.npz --stats S.json
  moe-plan score P.npz --load L.npy
  moe-plan explain P.npz --load L.npy --layer 3
  moe-plan COMMAND --help

Tables are for people, --json is for programs. Exit code 2 and one line on stderr: input that can
not be used.
"""
COMMANDS: tuple[ModuleType, ...] = (plan, score, diff, repair, replay, explain, convert)
"""Each has HELP, a docstring, EXAMPLES, add_arguments(parser) and run(parsed) → exit code."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point; exits the process: 0 done, 2 input that can not be used, 130 interrupted."""
    _open_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # bars where the terminal knows only ASCII
    try:
        code = _run(arguments)
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        _discard_stdout()
        code = 0
    except OSError as error:  # files of flags say themselves what is wrong with them
        _discard_stdout()
        _say(f"can not write to stdout: {error.strerror}")
        code = 2
    sys.exit(code)


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog=PROGRAM,
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for module in COMMANDS:
        added = commands.add_parser(
            module.__name__.rpartition(".")[2],
            help=module.HELP,
            description=module.__doc__,
            epilog=module.EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        module.add_arguments(added)
        added.set_defaults(run=module.run)
    return parser


def _run(arguments: Sequence[str] | None) -> int:
    try:
        parsed = build_parser().parse_args(arguments)
        return int(parsed.run(parsed))
    except UsageError as error:
        _say(str(error))
        return 2
    except MemoryError:
        _say("there is not enough memory for so large a problem: plan fewer layers at a time")
        return 2
    finally:
        sys.stdout.flush()


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # nobody can be told that stderr is full
        print(f"{PROGRAM}: {line}", file=sys.stderr)


def _open_closed_streams() -> None:
    """Where a shell closed stdout or stderr, Python has none, and print would take the other."""
    if sys.stdout is None:
        sys.stdout = _nowhere()
    if sys.stderr is None:
        sys.stderr = _nowhere()


def _nowhere() -> TextIO:
    """Open until the process ends."""
    return open(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8", closefd=False)


def _discard_stdout() -> None:
    """What is left in its buffer can not be written either, when the process ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
