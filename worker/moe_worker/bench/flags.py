"""Values of flags: what does not fit is said with what would.

Neighbour: `arguments` has the flags.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeVar

Value = TypeVar("Value")


def checked(parse: Callable[[str], Value]) -> Callable[[str], Value]:
    """A parser whose refusals argparse shows as they are."""

    def parse_checked(text: str) -> Value:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse_checked


def whole(least: int, most: int) -> Callable[[str], int]:
    """Parser of a whole number from `least` to `most`."""

    def parse(text: str) -> int:
        if not text.strip().isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} to {most}")
        return int(text)

    return parse


def number(least: float, most: float) -> Callable[[str], float]:
    """Parser of a number from `least` to `most`."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is no number from {least:g} to {most:g}")
        return value

    return parse
