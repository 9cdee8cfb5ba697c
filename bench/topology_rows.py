"""Topology measured: traffic between nodes, and how many nodes the experts of a token are on.

Shapes: L layers, E logical experts, R ranks, S slots a rank, D domains (nodes), T tokens, K
experts a token, M sets of nodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bench import greedy_hierarchical, placement_loads, recorded_loads
from bench.change_rows import alone, drawn
from bench.figure import Choice, Tally, timed
from bench.full_rows import checked, gap_of, published
from bench.placement_loads import LoadLE
from bench.recorded_loads import RoutingTLK
from moe_placement.copy_limits import CopyLimits
from moe_placement.placement import Placement
from moe_placement.topology import dispatch, localise, together

LoadLED = npt.NDArray[np.float64]
DomainsR = npt.NDArray[np.int64]

SLACK = 0.02
CROSSING_SHAPES = ("b", "c1", "d")
GOALS = {"uniform": -0.25, "skewed": -0.40}
NUM_EXPERTS, NUM_SLOTS, NUM_RANKS, NUM_NODES = 64, 80, 16, 4


def crossing(choice: Choice) -> Iterator[Tally]:
    """Share of assignments that leave the node of their token, with ranks within 2 % of balance."""
    for key in CROSSING_SHAPES:
        if key not in choice.shapes:
            continue
        shape, tally = choice.shape(key), Tally("crossing", key)
        domains_R = np.arange(shape.ranks) * shape.nodes // shape.ranks
        ranks = np.full(shape.ranks, shape.slots_per_rank), np.ones(shape.ranks)
        for kind in choice.loads:
            load = choice.load(key, kind)
            theirs = Placement.even(alone(published(shape, load)))
            for sources, goal in GOALS.items():
                load_LED = _by_source(load, shape.nodes, sources, drawn(key, kind, sources))
                plan, ms = timed(1, localise.plan, load_LED, *ranks, domains_R, CopyLimits(), SLACK)
                ours = checked(Placement(*plan), load)
                mine = crossing_share(ours, load_LED, domains_R)
                blind = blind_crossing_share(theirs, load_LED, domains_R)
                least = least_crossing_share(load_LED, shape.slots) / blind - 1
                four = goal if shape.nodes == 4 else None
                tally.add(
                    kind, f"crossing, {sources} sources, relative", "%", mine / blind - 1, 0.0,
                    goal=four, bound=least,
                )  # fmt: skip
                tally.add(kind, f"  share that crosses, {sources}", "%", mine, blind)
                worst = float(gap_of(ours, load).max())
                tally.add(kind, "  gap, worst layer", "%", worst, goal=SLACK, digits=2)
                tally.add(kind, "  time, all layers", "ms", ms, digits=0)
        yield tally


def _by_source(load_LE: LoadLE, num_nodes: int, sources: str, rng: np.random.Generator) -> LoadLED:
    """Loads by the node that sends: alike, or lognormal for each expert and node."""
    weight = np.ones((*load_LE.shape, num_nodes))
    if sources == "skewed":
        weight = rng.lognormal(0, 1.0, weight.shape)
    return np.asarray(load_LE[:, :, None] * weight / weight.sum(axis=2, keepdims=True))


def crossing_share(placement: Placement, load_LED: LoadLED, domains_R: DomainsR) -> float:
    """Share of assignments served outside their node, from the shares each node is given.

    The shares must be an expert's whole for each node, and the plan's fractions over all nodes.
    """
    slots, fractions = placement.slots_LRS, placement.fractions_LRS
    shares_DLRS = dispatch.source_shares(slots, fractions, domains_R, load_LED)
    held = slots >= 0
    layers = np.arange(len(slots))[:, None, None]
    served = np.zeros(slots.shape)
    crosses = 0.0
    for domain, share_LRS in enumerate(shares_DLRS):
        load_LE = load_LED[:, :, domain]
        found = placement_loads.faults(slots, load_LE.shape[1], share_LRS)
        assert not found, found
        tokens = np.where(held, share_LRS * load_LE[layers, np.maximum(slots, 0)], 0.0)
        served += tokens
        crosses += float(tokens[:, domains_R != domain].sum())
    total_LRS = load_LED.sum(axis=2)[layers, np.maximum(slots, 0)]
    assert np.allclose(served, np.where(held, fractions * total_LRS, 0.0), atol=1e-3)
    return crosses / float(load_LED.sum())


def blind_crossing_share(placement: Placement, load_LED: LoadLED, domains_R: DomainsR) -> float:
    """The same when copies are chosen without regard for the node of the token."""
    at_home = dispatch.domain_fractions(
        placement.slots_LRS, placement.fractions_LRS, domains_R, *load_LED.shape[1:]
    )
    return 1 - float((at_home * load_LED).sum() / load_LED.sum())


def least_crossing_share(load_LED: LoadLED, num_slots: int) -> float:
    """No placement lets less cross, balanced or not: each expert has a copy where most of its
    tokens come from, and the other slots hold what most of the rest asks for."""
    ordered_LED = -np.sort(-load_LED, axis=2)
    spare = num_slots - load_LED.shape[1]
    others_LN = ordered_LED[:, :, 1:].reshape(len(load_LED), -1)
    at_home = ordered_LED[:, :, 0].sum() + np.sort(others_LN, axis=1)[:, -spare:].sum()
    return 1 - float(at_home / load_LED.sum())


@dataclass(frozen=True)
class Reached:
    """Remote nodes that a token's experts are on, means; and imbalance that comes of it, minus 1.

    `drawn`: copies chosen at random by their fractions; `fewest`: so that the fewest nodes are
    reached."""

    ours_drawn: float
    published_drawn: float
    ours_fewest: float
    published_fewest: float
    ours_imbalance: float
    published_imbalance: float


def nodes_per_token(choice: Choice) -> Iterator[Tally]:
    """Real routing: planned on the first half of a domain's tokens, counted on the second."""
    tally = Tally("nodes", "V2Lite")
    for domain in recorded_loads.DOMAINS:
        tokens = recorded_loads.routing(domain)[:, : choice.max_layers]
        half = len(tokens) // 2
        reached = nodes_reached(tokens[:half], tokens[half:])
        for how, ours, theirs in (
            ("drawn", reached.ours_drawn, reached.published_drawn),
            ("fewest", reached.ours_fewest, reached.published_fewest),
        ):
            tally.add(domain, f"remote nodes a token, copies {how}", "", ours, theirs, digits=2)
        tally.add(
            domain, "  fewest, relative to published drawn", "%",
            reached.ours_fewest / reached.published_drawn - 1, 0.0, goal=-0.35,
        )  # fmt: skip
        tally.add(
            domain, "  fewest, relative to published fewest", "%",
            reached.ours_fewest / reached.published_fewest - 1, 0.0,
        )  # fmt: skip
        tally.add(
            domain, "  gap of what comes, copies drawn", "%", reached.ours_imbalance,
            reached.published_imbalance,
        )  # fmt: skip
        tally.add(
            domain, "  same, above the published method's", "%",
            reached.ours_imbalance - reached.published_imbalance, 0.0, goal=0.03,
        )  # fmt: skip
    yield tally


def nodes_reached(planned_TLK: RoutingTLK, counted_TLK: RoutingTLK) -> Reached:
    """Plan for some tokens, count on others; a token comes from each node as often."""
    load, then = (recorded_loads.counted(t, NUM_EXPERTS) for t in (planned_TLK, counted_TLK))
    domains_R = np.arange(NUM_RANKS) * NUM_NODES // NUM_RANKS
    per_rank = np.full(NUM_RANKS, NUM_SLOTS // NUM_RANKS)
    pairs = recorded_loads.pairs(planned_TLK, NUM_EXPERTS)
    ours = Placement(
        *together.plan(load, pairs, per_rank, np.ones(NUM_RANKS), domains_R, CopyLimits())
    )
    theirs = Placement.even(alone(greedy_hierarchical.plan(load, NUM_SLOTS, NUM_RANKS)))
    out = []
    for placement in (checked(ours, load), theirs):
        there = dispatch.domain_fractions(
            placement.slots_LRS, placement.fractions_LRS, domains_R, NUM_EXPERTS, NUM_NODES
        )
        out += [
            (
                _remote_nodes_drawn(counted_TLK, there),
                _fewest_remote_nodes(counted_TLK, placement.slots_LRS, domains_R),
                float(gap_of(placement, then).mean()),
            )
        ]
    (ours_drawn, ours_fewest, gap), (their_drawn, their_fewest, their_gap) = out
    return Reached(ours_drawn, their_drawn, ours_fewest, their_fewest, gap, their_gap)


def _remote_nodes_drawn(tokens_TLK: RoutingTLK, there_LED: LoadLED) -> float:
    """Expected number: a node is reached unless every expert's draw misses it."""
    layers = np.arange(tokens_TLK.shape[1])[:, None]
    reached = 1 - (1 - there_LED[layers, tokens_TLK]).prod(axis=2)
    return float(reached.sum(axis=2).mean()) * (1 - 1 / NUM_NODES)


def _fewest_remote_nodes(
    tokens_TLK: RoutingTLK, slots_LRS: npt.NDArray[np.int32], domains_R: DomainsR
) -> float:
    """Size of the smallest set of nodes that holds all experts of a token beside its own node."""
    held_LED = np.zeros((len(slots_LRS), NUM_EXPERTS, NUM_NODES), dtype=np.bool_)
    layers_N, ranks_N, slots_N = np.nonzero(slots_LRS >= 0)
    held_LED[layers_N, slots_LRS[layers_N, ranks_N, slots_N], domains_R[ranks_N]] = True
    bits_LE = (held_LED << np.arange(NUM_NODES)).sum(axis=2)
    bits_TLK = bits_LE[np.arange(len(slots_LRS))[:, None], tokens_TLK]
    size_M = np.array([int(m).bit_count() for m in range(2**NUM_NODES)])
    fewest = 0.0
    for own in range(NUM_NODES):
        best_TL = np.full(tokens_TLK.shape[:2], NUM_NODES)
        for nodes in np.argsort(-size_M, kind="stable").tolist():
            if nodes >> own & 1:
                holds_TL = ((bits_TLK & nodes) != 0).all(axis=2)
                best_TL[holds_TL] = size_M[nodes]
        fewest += float((best_TL - 1).mean()) / NUM_NODES
    return fewest
