"""Which positions of a step must be judged by the model's head, in the order of the batch.

The newest token of a sequence, because the next one is drawn from it; and for requests that want
the probabilities of their prompt, every prompt token that another one follows.
Neighbours: `batch` selects these rows, `sampler` reads their logits.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

from moe_worker.engine.schedule import Schedule, ScheduledSequence
from moe_worker.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class LogitRow:
    seq: Sequence
    position: int
    """Of the token that is computed; its logits are about the one after it."""
    draws: bool
    """Nothing follows yet: the next token is drawn from it."""


def logit_rows(schedule: Schedule) -> list[LogitRow]:
    """A sequence's rows lie one after another, in order of position."""
    return [row for entry in schedule.entries for row in rows_of(entry)]


def rows_of(entry: ScheduledSequence) -> Rows[LogitRow]:
    """Those of one sequence."""
    seq, end = entry.seq, entry.end
    drawn = (LogitRow(seq, end - 1, draws=True),) if entry.samples else ()
    if seq.params.prompt_logprobs is None:
        return drawn
    # Computed again after a preemption, tokens are not told a second time.
    first = max(entry.start, len(seq.prompt_logprobs))
    told = range(first, min(end, len(seq.prompt) - 1))
    return (*(LogitRow(seq, position, draws=False) for position in told), *drawn)
