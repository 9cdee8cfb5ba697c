"""What all ranks decide together before each step: one ballot each, one result for all.

Every rank applies the same pure function to the same ballots, so nobody leads: how many tokens
each rank brings, whether a staged epoch is switched or abandoned, whether the next generation
begins, whether a drained group dissolves. Decisions that must not be taken by one rank's clock
(a wave's deadline) enter as a wish in its ballot.

Neighbours: `council` carries ballots between ranks, `engine` fills them in and acts on the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields


class AgreementBroken(RuntimeError):
    """Ranks are not in the same step: a bug, never tried again."""


@dataclass(frozen=True)
class Ballot:
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

    def to_numbers(self) -> tuple[int, ...]:
        return astuple(self)

    @classmethod
    def from_numbers(cls, numbers: Sequence[int]) -> Ballot:
        return cls(*numbers)


NUM_FIELDS = len(fields(Ballot))


@dataclass(frozen=True)
class Agreement:
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
        if (ballot.step, ballot.generation, ballot.epoch_active) != (
            first.step,
            first.generation,
            first.epoch_active,
        ):
            raise AgreementBroken(f"rank 0 is at {first}, rank {rank} at {ballot}")
    most = max(ballots, key=lambda ballot: ballot.num_tokens)
    if most.num_rounds != max(ballot.num_rounds for ballot in ballots):
        raise AgreementBroken(f"ranks count rounds differently: {ballots}")
    abandon = frozenset(b.epoch_abandoned for b in ballots) - {0}
    ready = {ballot.epoch_ready for ballot in ballots}
    switch_to = next(iter(ready)) if len(ready) == 1 else 0
    generations = {ballot.generation_ready for ballot in ballots}
    begin = next(iter(generations)) if len(generations) == 1 else 0
    return Agreement(
        tokens_R=tuple(ballot.num_tokens for ballot in ballots),
        switch_to=switch_to if switch_to and switch_to not in abandon and not begin else None,
        abandon=abandon,
        begin_generation=begin or None,
        dissolve=not begin and all(ballot.draining == 2 for ballot in ballots),
    )
