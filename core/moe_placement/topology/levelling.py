"""Levelling: a placement made for near copies, changed as little as keeping the balance takes.

Least is lost when copies change places within a domain; then when two experts change domains
(`trades`); then when any copy makes room for another (`step_fractions`). Each is for the layers
that the one before has left above their limit. Neighbours: `localise` chooses the placement,
`crossing` the split.

Shapes: L layers, E logical experts, D domains, R ranks, S physical slots a rank.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moe_api.plan import SlotsLRS
from moe_placement.bound import lower_bound
from moe_placement.copy_limits import CopyLimits
from moe_placement.step import step_fractions
from moe_placement.topology import packing
from moe_placement.topology.crossing import expert_loads, least_crossing_tokens
from moe_placement.topology.dispatch import LoadLED
from moe_placement.topology.relief import ROUNDING, blocked
from moe_placement.topology.topology import Topology
from moe_placement.topology.trades import trade

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

MAX_TRADES = 10
"""Rounds of trades, one pair of a layer each."""


def level(
    load_LED: LoadLED,
    slots_LRS: SlotsLRS,
    topology: Topology,
    copies: CopyLimits,
    level_L: Floats,
    worth_LED: LoadLED,
) -> SlotsLRS:
    """Slots of the same shape with which a split can keep every rank at the level, where the steps
    above get there; also experts that the placement lacks get a slot.

    Args:
        level_L: load ÷ speed that a rank may have.
        worth_LED: what it is worth, in tokens that cross, that a domain holds an expert.
    """
    work = _Work(load_LED, slots_LRS, topology, level_L[:, None] * topology.speeds_R)
    work.try_out(work.exchanged(work.open_L))
    layers_L = work.open_L
    for _ in range(MAX_TRADES):
        if not len(layers_L):
            break
        helped_L = work.try_out(work.traded(layers_L, worth_LED[layers_L]))
        layers_L = np.intersect1d(helped_L, work.open_L)
    layers_L = work.open_L
    if len(layers_L):
        load_LE = load_LED[layers_L].sum(axis=2)
        bound_L = lower_bound(load_LE, topology.slots_R, topology.speeds_R, copies.max_copies)
        work.slots_LRS[layers_L], _ = step_fractions.improve(
            load_LE,
            work.slots_LRS[layers_L],
            topology.slots_R,
            topology.speeds_R,
            copies,
            float((level_L[layers_L] / bound_L).min()) - 1.0,
        )
    return work.slots_LRS


class _Work:
    """The placement, its tokens when they cross least, and what they are above the limits."""

    def __init__(
        self, load_LED: LoadLED, slots_LRS: SlotsLRS, topology: Topology, limit_LR: Floats
    ) -> None:
        self._load_LED, self._topology, self._limit_LR = load_LED, topology, limit_LR
        self.slots_LRS = slots_LRS.copy()
        self._token_LRS = least_crossing_tokens(load_LED, slots_LRS, topology.domains_R, limit_LR)
        self._excess_L = self._excess(self._token_LRS, limit_LR)

    @property
    def open_L(self) -> Ints:
        """Layers above their limits."""
        over_LR = self._token_LRS.sum(axis=2) > self._limit_LR * (1 + 2 * ROUNDING)
        return np.flatnonzero(over_LR.any(axis=1))

    def exchanged(self, layers_L: Ints) -> tuple[Ints, SlotsLRS]:
        return layers_L, packing.exchange(
            self.slots_LRS[layers_L], self._token_LRS[layers_L], self._topology, 0.0
        )

    def traded(self, layers_L: Ints, worth_LED: LoadLED) -> tuple[Ints, SlotsLRS]:
        """The layers in which a pair was found, with domains levelled after the trade."""
        slots_LRS, token_LRS = self.slots_LRS[layers_L], self._token_LRS[layers_L]
        limit_LR, load_LED = self._limit_LR[layers_L], self._load_LED[layers_L]
        domains_R = self._topology.domains_R
        blocked_LR = blocked(load_LED, slots_LRS, domains_R, token_LRS, limit_LR)
        room_LR = limit_LR - token_LRS.sum(axis=2)
        new_LRS = trade(load_LED, slots_LRS, self._topology, room_LR, blocked_LR, worth_LED)
        changed_LRS = new_LRS != slots_LRS
        # Only experts with a single copy change domains: it has all their tokens.
        token_LRS = np.where(changed_LRS, expert_loads(load_LED.sum(axis=2), new_LRS), token_LRS)
        found_L = changed_LRS.any(axis=(1, 2))
        new_LRS = packing.exchange(new_LRS[found_L], token_LRS[found_L], self._topology, 0.0)
        return layers_L[found_L], new_LRS

    def try_out(self, proposal: tuple[Ints, SlotsLRS]) -> Ints:
        """Keep what lowers the excess of a layer; returns those layers."""
        layers_L, slots_LRS = proposal
        limit_LR = self._limit_LR[layers_L]
        token_LRS = least_crossing_tokens(
            self._load_LED[layers_L], slots_LRS, self._topology.domains_R, limit_LR
        )
        excess_L = self._excess(token_LRS, limit_LR)
        better_L = excess_L < self._excess_L[layers_L] * (1 - 1e-6)
        kept_L = layers_L[better_L]
        self.slots_LRS[kept_L] = slots_LRS[better_L]
        self._token_LRS[kept_L] = token_LRS[better_L]
        self._excess_L[kept_L] = excess_L[better_L]
        return kept_L

    @staticmethod
    def _excess(token_LRS: Floats, limit_LR: Floats) -> Floats:
        return np.asarray(np.maximum(token_LRS.sum(axis=2) - limit_LR, 0.0).sum(axis=1))
