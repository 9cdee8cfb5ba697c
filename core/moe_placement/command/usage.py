"""The one error of `moe-plan`: input that can not be used as it is."""

from __future__ import annotations

LONGEST = 600
"""Characters of a line on stderr, whatever a file held."""


class UsageError(ValueError):
    """A flag or file that can not be used; one line that names it, its value and the way out."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


def one_line(message: str) -> str:
    """`message` for a terminal: what would steer it is escaped, the middle of a long one left out.

    Names of files, flags and corpora are strings of others.
    """
    words = " ".join(message.split())
    shown = "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in words
    )
    if len(shown) <= LONGEST:
        return shown
    return f"{shown[: LONGEST * 2 // 3]} … {shown[-LONGEST // 3 :]}"
