"""The demo's recorded set: the same prompts with the same seeds to the same ranks, each time.

Answers do not depend on what else runs, so each replay routes the very same tokens: what ranks
serve of it changes with the placement alone, and a plan's promise for the set can be computed
beforehand. Neighbours: `traffic` (sends it), `load` (counts what was served).
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

MODEL_FOLDER = Path(__file__).resolve().parents[1] / "tiny-moe"
PROMPT_CHARACTERS = 400
NUM_PROMPTS = 36


@dataclass(frozen=True)
class Recorded:
    prompt: str
    seed: int
    rank: int
    """Rank that is asked, by its place in the plan."""


def code_prompts(num_ranks: int) -> list[Recorded]:
    """Pieces of code that the model has not been trained on, dealt out to the ranks in turn."""
    text = (MODEL_FOLDER / "heldout" / "code.txt").read_text()
    starts = range(0, len(text) - PROMPT_CHARACTERS, PROMPT_CHARACTERS)
    pieces = [text[start : start + PROMPT_CHARACTERS] for start in starts]
    random.Random(0).shuffle(pieces)
    chosen = pieces[: NUM_PROMPTS - NUM_PROMPTS % num_ranks]
    return [Recorded(piece, seed, seed % num_ranks) for seed, piece in enumerate(chosen)]
