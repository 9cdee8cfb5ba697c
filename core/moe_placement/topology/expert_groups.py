"""Expert groups: which domain an expert's group is best kept in.

Models that route a token to experts of a few groups send it to few domains when a group lives in
one. That is a wish: where a domain would have too much, its experts go elsewhere. Neighbours:
`homes` (follows the wish as far as it costs no balance), `localise` (the recipe).

Shapes: L layers, E logical experts, G groups of as many experts each, D domains.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moe_placement.score import LoadLE
from moe_placement.topology.topology import Topology

Ints = npt.NDArray[np.int64]
_NOWHERE = -1


class ExpertGroupsError(ValueError):
    """Groups that a model cannot have."""


def home_domains(load_LE: LoadLE, num_groups: int, topology: Topology) -> Ints:
    """Domain for each expert's group, int64 [L, E]; −1 where no domain has slots for a whole group.

    The most loaded group first, to the domain with the lowest load ÷ speed that has slots for it;
    then groups change places as long as that lowers the higher of two domains.

    Raises:
        ExpertGroupsError: the experts do not divide into so many groups.
    """
    num_layers, num_experts = load_LE.shape
    if num_groups < 1 or num_experts % num_groups:
        raise ExpertGroupsError(
            f"{num_experts} experts do not divide into {num_groups} groups: give a number of "
            "groups that divides them, or none"
        )
    size = num_experts // num_groups
    load_LG = load_LE.reshape(num_layers, num_groups, size).sum(axis=2)
    speeds_D = np.where(topology.speeds_D > 0, topology.speeds_D, 1.0)
    domain_LG = _deal(load_LG, topology.slots_D // size, speeds_D)
    _exchange(load_LG, domain_LG, speeds_D)
    return np.repeat(domain_LG, size, axis=1)


def _deal(load_LG: LoadLE, room_D: Ints, speeds_D: npt.NDArray[np.float64]) -> Ints:
    num_layers, num_groups = load_LG.shape
    layers = np.arange(num_layers)
    domain_LG = np.full((num_layers, num_groups), _NOWHERE, dtype=np.int64)
    load_LD = np.zeros((num_layers, len(room_D)))
    room_LD = np.tile(room_D, (num_layers, 1))
    order_LG = np.argsort(-load_LG, axis=1, kind="stable")
    for group in order_LG.T:
        level_LD = (load_LD + load_LG[layers, group, None]) / speeds_D
        domain = np.argmin(np.where(room_LD > 0, level_LD, np.inf), axis=1)
        fits = room_LD[layers, domain] > 0
        domain_LG[layers[fits], group[fits]] = domain[fits]
        load_LD[layers[fits], domain[fits]] += load_LG[layers[fits], group[fits]]
        room_LD[layers[fits], domain[fits]] -= 1
    return domain_LG


def _exchange(load_LG: LoadLE, domain_LG: Ints, speeds_D: npt.NDArray[np.float64]) -> None:
    num_layers, num_groups = load_LG.shape
    layers = np.arange(num_layers)
    for _ in range(num_groups * num_groups):
        at_LG = np.maximum(domain_LG, 0)
        load_LD = np.zeros((num_layers, len(speeds_D)))
        np.add.at(load_LD, (layers[:, None], at_LG), np.where(domain_LG >= 0, load_LG, 0.0))
        here_LG = load_LD[layers[:, None], at_LG]
        shift_LGG = load_LG[:, :, None] - load_LG[:, None]
        speed_LG = speeds_D[at_LG]
        before_LGG = np.maximum((here_LG / speed_LG)[:, :, None], (here_LG / speed_LG)[:, None])
        after_LGG = np.maximum(
            (here_LG[:, :, None] - shift_LGG) / speed_LG[:, :, None],
            (here_LG[:, None] + shift_LGG) / speed_LG[:, None],
        )
        apart_LGG = (domain_LG[:, :, None] != domain_LG[:, None]) & (
            np.minimum(domain_LG[:, :, None], domain_LG[:, None]) >= 0
        )
        gain_LN = np.where(apart_LGG, before_LGG - after_LGG, 0.0).reshape(num_layers, -1)
        best_L = np.argmax(gain_LN, axis=1)
        todo = np.flatnonzero(gain_LN[layers, best_L] > 1e-9 * load_LG.sum(axis=1))
        if not len(todo):
            return
        one, two = np.divmod(best_L[todo], num_groups)
        domain_LG[todo, one], domain_LG[todo, two] = domain_LG[todo, two], domain_LG[todo, one]
