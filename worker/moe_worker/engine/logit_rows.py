"""Which positions of a step must be judged by the model's head, in the order of the batch.

The newest token of a sequence, because the next one is drawn from it; and for requests that want
the probabilities of their prompt, every prompt token that another one follows.
Neighbours: `batch` selects these rows, `sampler` reads their logits.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import NamedTuple

from moe_worker.engine.schedule import Schedule, ScheduledSequence
from moe_worker.engine.sequence import Sequence


class LogitRow(NamedTuple):
    seq: Sequence
    position: int
    """Of the token that is computed; its logits are about the one after it."""
    draws: bool
    """Nothing follows yet: the next token is drawn from it."""


def logit_rows(schedule: Schedule) -> list[LogitRow]:
    """A sequence's rows lie one after another, in order of position."""
    rows = []
    for entry in schedule.entries:
        seq, newest = entry.seq, entry.end - 1 if entry.samples else None
        for position in positions_of(entry):
            rows.append(LogitRow(seq, position, position == newest))
    return rows


def positions_of(entry: ScheduledSequence) -> Rows[int]:
    """Those of one sequence."""
    seq, start, num_tokens, samples, _ = entry
    end = start + num_tokens
    drawn = (end - 1,) if samples else ()
    if seq.params.prompt_logprobs is None:
        return drawn
    # Computed again after a preemption, tokens are not told a second time.
    first = max(start, len(seq.prompt_logprobs))
    return (*range(first, min(end, len(seq.prompt) - 1)), *drawn)
