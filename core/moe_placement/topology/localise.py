"""Localise: a full plan that puts copies into the domains whose tokens they serve.

Traffic between domains (hosts, racks) is dear. A plan that sees them costs no more than a little
balance and saves a quarter to more than half of what crosses: which copies a domain holds
(`homes`), on which of its ranks (`packing`), put right where that is out of balance (`levelling`),
and the split that crosses least (`crossing`). A layer for which that fails gets the plan that sees
no domains. Neighbours: `full_fractions` (that plan), `together` (near what tokens choose, not
where they come from).

Shapes: L layers, E logical experts, D domains, R ranks, S physical slots a rank.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moe_api.plan import FractionsLRS, SlotsLRS
from moe_placement.capacity import DomainsR, SlotsR, SpeedsR
from moe_placement.copy_limits import CopyLimits
from moe_placement.full import full_fractions
from moe_placement.placement import copies as copies_of
from moe_placement.score import LoadLE, rank_loads
from moe_placement.topology import expert_groups, homes, packing
from moe_placement.topology.crossing import SLACK, least_crossing, least_crossing_tokens
from moe_placement.topology.dispatch import LoadLED, domain_fractions, source_loads
from moe_placement.topology.homes import CountsLED
from moe_placement.topology.levelling import level
from moe_placement.topology.relief import ROUNDING
from moe_placement.topology.topology import Topology

Floats = npt.NDArray[np.float64]

GROUP_WORTH = 0.3
"""Crossings, as a share of an expert's tokens, that it is worth to have its group together."""


def plan(
    load: LoadLE | LoadLED,
    slots_R: SlotsR,
    speeds_R: SpeedsR,
    domains_R: DomainsR,
    copies: CopyLimits,
    slack: float = SLACK,
    num_groups: int | None = None,
) -> tuple[SlotsLRS, FractionsLRS]:
    """Slots int32 and fractions float64, [L, R, most slots], with little traffic between domains
    and no rank more than `slack` above the largest load ÷ speed of a plan that sees no domains.

    Args:
        load: [L, E], every rank sends alike; or by the domain that sends, [L, E, D].
        num_groups: of experts that are routed to as a unit, best kept in one domain each.

    Raises:
        CopyLimitsError: the slots cannot hold min_copies of each expert on different ranks.
        ExpertGroupsError: the experts do not divide into so many groups.
    """
    load_LED = load if load.ndim == 3 else source_loads(load, domains_R)
    load_LED = np.where(load_LED.any(axis=(1, 2), keepdims=True), load_LED, 1.0)
    load_LE = load_LED.sum(axis=2)
    topology = Topology(slots_R, speeds_R, domains_R, load_LED.shape[2])
    plain_LRS, fractions_LRS = full_fractions.plan(load_LE, slots_R, speeds_R, copies)
    if (topology.ranks_D > 0).sum() < 2:
        return plain_LRS, fractions_LRS
    worth_LED = None
    if num_groups is not None:
        home_LE = expert_groups.home_domains(load_LE, num_groups, topology)
        here_LED = home_LE[:, :, None] == np.arange(topology.num_domains)
        worth_LED = GROUP_WORTH * load_LE[:, :, None] * here_LED
    level_L = (1 + slack) * highest(plain_LRS, fractions_LRS, load_LE, speeds_R)
    counts_LED = homes.choose(
        load_LED,
        topology,
        level_L,
        copies.min_copies,
        copies.most(int((slots_R > 0).sum())),
        worth_LED,
    )
    worth_LED = load_LED if worth_LED is None else load_LED + worth_LED
    near_LRS = place(counts_LED, load_LED, topology, copies, level_L, worth_LED)
    return kept(near_LRS, plain_LRS, load_LED, topology, copies, level_L)


def place(
    counts_LED: CountsLED,
    load_LED: LoadLED,
    topology: Topology,
    copies: CopyLimits,
    level_L: Floats,
    worth_LED: LoadLED,
) -> SlotsLRS:
    """Slots for the copies that domains are to hold, changed where balance asks for it."""
    each_LED = _expected(counts_LED, load_LED, topology, level_L)
    slots_LRS, token_LRS = packing.deal(counts_LED, each_LED, topology)
    slots_LRS = packing.exchange(slots_LRS, token_LRS, topology, 0.0)
    return level(load_LED, slots_LRS, topology, copies, level_L, worth_LED)


def kept(
    near_LRS: SlotsLRS,
    plain_LRS: SlotsLRS,
    load_LED: LoadLED,
    topology: Topology,
    copies: CopyLimits,
    level_L: Floats,
) -> tuple[SlotsLRS, FractionsLRS]:
    """Of each layer the placement that sees domains, if it is whole and keeps to the level, or else
    the plain one; with the split that crosses least."""
    load_LE = load_LED.sum(axis=2)
    speeds_R, domains_R = topology.speeds_R, topology.domains_R
    fractions_LRS = least_crossing(load_LED, near_LRS, speeds_R, domains_R, level_L=level_L)
    count_LE = copies_of(near_LRS, load_LE.shape[1])
    good_LE = (count_LE >= copies.min_copies) & (count_LE <= copies.most(topology.num_ranks))
    high_L = highest(near_LRS, fractions_LRS, load_LE, speeds_R)
    plain_L = ~(good_LE.all(axis=1) & (high_L <= level_L * (1 + 3 * ROUNDING)))
    slots_LRS = np.where(plain_L[:, None, None], plain_LRS, near_LRS)
    if plain_L.any():
        fractions_LRS[plain_L] = least_crossing(
            load_LED[plain_L], plain_LRS[plain_L], speeds_R, domains_R, level_L=level_L[plain_L]
        )
    return slots_LRS, fractions_LRS


def highest(
    slots_LRS: SlotsLRS, fractions_LRS: FractionsLRS, load_LE: LoadLE, speeds_R: SpeedsR
) -> Floats:
    """Largest load ÷ speed of each layer, [L]."""
    loads_LR = rank_loads(slots_LRS, fractions_LRS, load_LE)
    return np.asarray((loads_LR / speeds_R).max(axis=1))


def _expected(
    counts_LED: CountsLED, load_LED: LoadLED, topology: Topology, level_L: Floats
) -> Floats:
    """Load that each copy of an expert in a domain will carry, [L, E, D].

    Domains share as ranks do when least is to cross, each as much as its ranks can take; then what
    a domain's copies of an expert cannot carry goes to the expert's other copies.
    """
    num_experts, num_domains = load_LED.shape[1:]
    held_LDE = counts_LED.transpose(0, 2, 1) > 0
    width = int(held_LDE.sum(axis=2).max())
    order_LDE = np.argsort(~held_LDE, axis=2, kind="stable")[:, :, :width]
    held_LDW = np.where(np.take_along_axis(held_LDE, order_LDE, 2), order_LDE, -1).astype(np.int32)
    domains_D = np.arange(num_domains)
    token_LDW = least_crossing_tokens(
        load_LED, held_LDW, domains_D, level_L[:, None] * topology.speeds_D
    )
    token_LED = domain_fractions(held_LDW, token_LDW, domains_D, num_experts, num_domains)
    most_LED = counts_LED * homes.carried(load_LED, topology, level_L)[:, None, :]
    over_LED = np.maximum(token_LED - most_LED, 0.0)
    room_LED = np.maximum(most_LED - token_LED, 0.0)
    over_LE1, room_LE1 = (array.sum(axis=2, keepdims=True) for array in (over_LED, room_LED))
    part_LE1 = np.minimum(over_LE1 / np.where(room_LE1 > 0, room_LE1, np.inf), 1.0)
    stays_LE1 = np.maximum(over_LE1 - room_LE1, 0.0) / np.where(over_LE1 > 0, over_LE1, 1.0)
    token_LED = np.minimum(token_LED, most_LED) + part_LE1 * room_LED + stays_LE1 * over_LED
    return np.asarray(token_LED / np.maximum(counts_LED, 1))
