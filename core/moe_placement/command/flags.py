"""Values of flags: numbers, lists of ranks, byte counts; what does not fit is said in one line.

Neighbours: `arguments` groups the flags of the sub-commands.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import NoReturn

from moe_placement.command.usage import one_line

MAX_LISTED = 4096
UNITS = {
    "": 1,
    "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12,
    "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40,
}  # fmt: skip


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage before it."""

    def error(self, message: str) -> NoReturn:
        line = one_line(message.removeprefix("argument "))
        self.exit(2, f"{self.prog}: {line} (see {self.prog} --help)\n")


def whole(least: int, most: int = 2**31 - 1) -> Callable[[str], int]:
    """Parser of a whole number from `least` to `most`."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from error
        if not least <= number <= most:
            raise argparse.ArgumentTypeError(f"{number} must be {least} to {most}")
        return number

    return parse


def number(least: float, most: float) -> Callable[[str], float]:
    """Parser of a number from `least` to `most`."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r} is no number") from error
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text} must be {least:g} to {most:g}")
        return value

    return parse


def counts(text: str) -> tuple[int, ...]:
    """`9` or `9,9,8`: whole numbers from 0."""
    return tuple(whole(0)(part.strip()) for part in _parts(text))


def ranks(text: str) -> tuple[int, ...]:
    """`3,7` or `8-15`: ranks by number, each once, in ascending order."""
    out: set[int] = set()
    for part in _parts(text):
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part.strip())
        low = int(match[1]) if match else 0
        high = int(match[2] or low) if match else -1
        if not low <= high < low + MAX_LISTED:
            raise argparse.ArgumentTypeError(f"{part!r} is no rank, or range of ranks like 8-15")
        out.update(range(low, high + 1))
    return tuple(sorted(out))


def names(text: str) -> tuple[str, ...]:
    """`law,intent`: names in the order given."""
    found = tuple(part.strip() for part in _parts(text))
    if not all(found):
        raise argparse.ArgumentTypeError(f"{text!r} has an empty name")
    return found


def windows(text: str) -> slice:
    """`3`, `0:4`, `2:`: windows by number, the end not included."""
    match = re.fullmatch(r"(\d{0,9}):(\d{0,9})|(\d{1,9})", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no window or range of windows like 0:4")
    if match[3]:
        return slice(int(match[3]), int(match[3]) + 1)
    return slice(int(match[1] or 0), int(match[2]) if match[2] else None)


def byte_count(text: str) -> int:
    """`44040192`, `42Mi`, `44M`: bytes, decimal or binary units."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,6})?) ?([KMGT]I?|)B?", text.strip().upper())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of bytes like 44040192 or 42Mi")
    count = float(match[1]) * UNITS[match[2]]
    if not 1 <= count <= 2**53:
        raise argparse.ArgumentTypeError(f"{text} must be 1 byte to {2**53} bytes")
    return round(count)


def _parts(text: str) -> list[str]:
    parts = text.split(",")
    if len(parts) > MAX_LISTED:
        raise argparse.ArgumentTypeError(f"{len(parts)} entries, at most {MAX_LISTED}")
    return parts
