"""How many tokens prompts and answers have: a number, or a uniform distribution."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

MAX_TOKENS = 1_000_000


@dataclass(frozen=True)
class Lengths:
    """Whole numbers from `least` to `most`, each as likely as any other."""

    least: int
    most: int

    def draw(self, random_source: random.Random) -> int:
        return random_source.randint(self.least, self.most)

    def __str__(self) -> str:
        return str(self.least) if self.least == self.most else f"uniform:{self.least},{self.most}"


def parse_lengths(text: str) -> Lengths:
    """`128` or `uniform:64,256`.

    Raises:
        ValueError: naming what was given and what is allowed.
    """
    match = re.fullmatch(r"([0-9]{1,7})|uniform:([0-9]{1,7}),([0-9]{1,7})", text.strip())
    if match is None:
        raise ValueError(f"{text!r} is neither a number like 128 nor like uniform:64,256")
    least, most = int(match[1] or match[2]), int(match[1] or match[3])
    if not 1 <= least <= most <= MAX_TOKENS:
        raise ValueError(f"{text!r} must be 1 to {MAX_TOKENS}, the smaller number first")
    return Lengths(least, most)
