"""What all ranks decide together before each step: one ballot each, one result for all.

Every rank applies the same pure function to the same ballots, so nobody leads: how many tokens
each rank brings, whether a staged epoch is switched or abandoned, whether the next generation
begins, whether a drained group dissolves. Decisions that must not be taken by one rank's clock
(a wave's deadline) enter as a wish in its ballot.

Neighbours: `council` carries ballots between ranks, `engine` fills them in and acts on the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class AgreementBroken(RuntimeError):
    """Ranks are not in the same step: a bug, never tried again."""


class Ballot(NamedTuple):
    """All numbers are this rank's own; 0 = nothing of that kind."""

    step: int
    generation: int
    epoch_active: int
    epoch_ready: int
    """Epoch whose weights are complete here and which is not in force yet."""
    epoch_abandoned: int
    """Epoch that this rank wants abandoned: past its deadline, or impossible here."""
    generation_ready: int
    """Generation that this rank could begin at once, or would be left out of."""
    num_tokens: int
    num_rounds: int
    draining: int
    """1 = admits nothing new, 2 = and has nothing left to do."""


NUM_FIELDS = len(Ballot._fields)
_PLACE = 3
"""Fields of a ballot that say where its rank stands: they are the same in all."""


class Agreement(NamedTuple):
    tokens_R: tuple[int, ...]
    """Tokens of every rank in this step."""
    switch_to: int | None = None
    """Epoch to put in force before this step."""
    abandon: frozenset[int] = frozenset()
    """Epochs that nobody may put in force."""
    begin_generation: int | None = None
    """The group ends before this step; its members go on in this generation or leave."""
    dissolve: bool = False
    """Everybody drains and is done: the group ends."""

    @property
    def idle(self) -> bool:
        return not any(self.tokens_R)


def decide(ballots: Sequence[Ballot]) -> Agreement:
    """The step that follows from the ballots of all ranks, in rank order.

    Raises:
        AgreementBroken: step, generation, epoch in force or the size of a round differ.
    """
    first = ballots[0]
    for rank, ballot in enumerate(ballots):
        if ballot[:_PLACE] != first[:_PLACE]:
            raise AgreementBroken(f"rank 0 is at {first}, rank {rank} at {ballot}")
    of_ranks = zip(*ballots, strict=True)
    _, _, _, ready, abandoned, generations, tokens_R, rounds_R, draining = of_ranks
    if rounds_R[tokens_R.index(max(tokens_R))] != max(rounds_R):
        raise AgreementBroken(f"ranks count rounds differently: {ballots}")
    abandon = frozenset(abandoned) - {0}
    switch_to, begin = _common(ready), _common(generations)
    return Agreement(
        tokens_R=tokens_R,
        switch_to=switch_to if switch_to and switch_to not in abandon and not begin else None,
        abandon=abandon,
        begin_generation=begin or None,
        dissolve=not begin and _common(draining) == 2,
    )


def _common(numbers: tuple[int, ...]) -> int:
    """What all ranks have; 0 where they differ."""
    return numbers[0] if numbers.count(numbers[0]) == len(numbers) else 0
