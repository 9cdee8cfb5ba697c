"""The way from one plan to another: wave after wave, what each receives and over which links.

Neighbours: `waves` makes the waves, `migration` names the sources; `diff` and `plan` show them.

Shapes: L MoE layers, R ranks, S physical slots a rank, D domains.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from moe_api.plan import SlotsLRS
from moe_placement import placement
from moe_placement.capacity import Capacity
from moe_placement.command.progress import Bar
from moe_placement.command.usage import UsageError
from moe_placement.walk import migration, waves
from moe_placement.walk.migration import Move
from moe_placement.walk.waves import Limits


@dataclass(frozen=True, eq=False)
class Step:
    """One wave."""

    moves: tuple[Move, ...]
    retired: int
    """Copies that are given up at its switch."""
    links_DD: npt.NDArray[np.int64]
    """Weights from domain to domain."""
    from_checkpoint: int
    """Weights that no live rank has."""
    fullest_rank: int
    """Weights that one rank receives, or gives, at most."""

    @property
    def crossing(self) -> int:
        return int(self.links_DD.sum() - np.trace(self.links_DD))


@dataclass(frozen=True, eq=False)
class Journey:
    steps: tuple[Step, ...]
    reached: bool
    """Whether the last wave is the plan wanted."""
    received: int
    """Weights that some rank needs and does not have: the least that any way moves."""

    @property
    def moves(self) -> int:
        """Weights moved on the whole way, detours included."""
        return sum(len(step.moves) for step in self.steps)

    @property
    def links_DD(self) -> npt.NDArray[np.int64]:
        none = np.zeros((1, 1), dtype=np.int64)
        return np.asarray(sum((step.links_DD for step in self.steps), start=none))

    def to_json(self, bytes_per_expert: int) -> dict[str, Any]:
        return {
            "moves": self.received,
            "moves_walked": self.moves,
            "bytes": self.moves * bytes_per_expert,
            "bytes_per_expert": bytes_per_expert,
            "waves": len(self.steps),
            "reached": self.reached,
            "steps": [
                {
                    "moves": [
                        {
                            "layer": move.layer,
                            "expert": move.expert,
                            "rank": move.rank,
                            "slot": move.slot,
                            "source": move.sources[0][0] if move.sources else None,
                        }
                        for move in step.moves
                    ],
                    "retired": step.retired,
                    "bytes": len(step.moves) * bytes_per_expert,
                    "crossing_bytes": step.crossing * bytes_per_expert,
                    "from_checkpoint": step.from_checkpoint,
                }
                for step in self.steps
            ],
        }


def travel(
    current_LRS: SlotsLRS, target_LRS: SlotsLRS, capacity: Capacity, limits: Limits
) -> Journey:
    """Walk from `current` to `target` within the limits of a wave.

    Raises:
        UsageError: no walk may lead there.
    """
    steps: list[Step] = []
    at_LRS = _roomy(current_LRS, limits)
    for wave_LRS in walk(current_LRS, target_LRS, limits):
        steps.append(_step(at_LRS, wave_LRS, capacity))
        at_LRS = wave_LRS
    return Journey(
        steps=tuple(steps),
        reached=migration.reached(at_LRS, target_LRS),
        received=placement.received(current_LRS, target_LRS),
    )


def walk(current_LRS: SlotsLRS, target_LRS: SlotsLRS, limits: Limits) -> Iterator[SlotsLRS]:
    """The waves from `current` on, as far as they get.

    Raises:
        UsageError: no walk may lead to `target`.
    """
    at_LRS = _roomy(current_LRS, limits)
    with Bar("walking") as bar:
        while True:
            try:
                wave_LRS = waves.next_wave(at_LRS, target_LRS, limits)
            except waves.WalkError as error:
                raise UsageError(str(error)) from error
            if wave_LRS is None:
                return
            yield wave_LRS
            at_LRS = wave_LRS
            bar.advance()


def _roomy(slots_LRS: SlotsLRS, limits: Limits) -> SlotsLRS:
    """With a column for every physical slot, spare ones too."""
    most = 0 if limits.slots_R is None else int(limits.slots_R.max())
    missing = max(most - slots_LRS.shape[2], 0)
    return np.pad(slots_LRS, ((0, 0), (0, 0), (0, missing)), constant_values=-1)


def _step(old_LRS: SlotsLRS, new_LRS: SlotsLRS, capacity: Capacity) -> Step:
    domains = [(str(domain),) for domain in capacity.domains_R.tolist()]
    moves = tuple(migration.diff(old_LRS, new_LRS, domains, live_R=capacity.live_R))
    num_domains = int(capacity.domains_R.max()) + 1
    links_DD = np.zeros((num_domains, num_domains), dtype=np.int64)
    gives_R = np.zeros(capacity.num_ranks, dtype=np.int64)
    takes_R = np.zeros(capacity.num_ranks, dtype=np.int64)
    for move in moves:
        takes_R[move.rank] += 1
        if move.sources:
            source = move.sources[0][0]
            gives_R[source] += 1
            links_DD[capacity.domains_R[source], capacity.domains_R[move.rank]] += 1
    before = int((old_LRS >= 0).sum())
    return Step(
        moves=moves,
        retired=before + len(moves) - int((new_LRS >= 0).sum()),
        links_DD=links_DD,
        from_checkpoint=sum(1 for move in moves if not move.sources),
        fullest_rank=int(max(gives_R.max(), takes_R.max())),
    )
