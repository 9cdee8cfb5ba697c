"""Relief: load moves from ranks that are too full to ranks with room, at the fewest crossings.

A copy hands tokens to another copy of its expert, whose rank may hand on others, and so on, until
a rank has room. A token leaves its domain (cost 1), comes home (−1) or neither. Relieving always
along the cheapest chains keeps the split the one that crosses least for the loads it has, so what
remains when no rank is too full is the optimum. Neighbour: `crossing`, which starts it.

All layers go on at once. Flat shapes: X (layer, rank), N copies of experts that have several, in
the order of J (layer, expert, domain) and M (layer, expert); B one chain of each of some layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moe_api.plan import SlotsLRS
from moe_placement.capacity import DomainsR
from moe_placement.topology.dispatch import LoadLED

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

MAX_ROUNDS = 400
ROUNDING = 1e-7
"""Above a limit by this part is not above it."""
TOLERANCE = 1e-9
"""Part of a layer's tokens that is not worth moving."""
SPARE_ENDS = 4
"""Ends of chains tried, as a multiple of those that would do if every chain carried enough."""
_FAR = 1 << 20
_NONE = -1


def relieve(
    load_LED: LoadLED,
    slots_LRS: SlotsLRS,
    domains_R: DomainsR,
    token_LRS: Floats,
    limit_LR: Floats,
) -> Floats:
    """Tokens of each slot [L, R, S] with no rank above its limit and the least crossing.

    Args:
        token_LRS: where everything starts: the least crossing without limits.

    A limit that cannot be met, or not within MAX_ROUNDS, is met as nearly as the rounds allow.
    """
    token_LRS, limit_LR = token_LRS.copy(), limit_LR * (1 + ROUNDING)
    open_L = np.arange(len(slots_LRS))
    rounds = 0
    while len(open_L) and rounds < MAX_ROUNDS:
        flow = _Flow.of(
            load_LED[open_L], slots_LRS[open_L], domains_R, token_LRS[open_L], limit_LR[open_L]
        )
        rounds += flow.run(MAX_ROUNDS - rounds)
        token_LRS[open_L] = flow.tokens(token_LRS[open_L])
        open_L = open_L[flow.unfinished()]
    return token_LRS


def blocked(
    load_LED: LoadLED,
    slots_LRS: SlotsLRS,
    domains_R: DomainsR,
    token_LRS: Floats,
    limit_LR: Floats,
) -> npt.NDArray[np.bool_]:
    """Ranks [L, R] above their limit, and those that they could hand tokens to in the end: when
    none of these has room, all are full and no split of the tokens relieves them."""
    limit_LR = limit_LR * (1 + 2 * ROUNDING)
    flow = _Flow.of(load_LED, slots_LRS, domains_R, token_LRS, limit_LR)
    cost_X, _, _ = flow.chains()
    return (cost_X < _FAR).reshape(limit_LR.shape)


@dataclass(eq=False)
class _Flow:
    at_N: tuple[Ints, Ints, Ints]
    """Layer, rank, slot of each copy."""
    token_N: Floats
    rank_N: Ints
    domain_N: Ints
    """Number in J of each copy."""
    domain_start_J: Ints
    expert_J: Ints
    """Number in M."""
    expert_start_M: Ints
    served_J: Floats
    wanted_J: Floats
    """What the domain's copies serve, and what the domain sends to the expert."""
    leave_J: Ints
    enter_J: Ints
    """Crossings of a token that leaves the domain, or enters it, for another copy."""
    by_rank_N: Ints
    rank_start: Ints
    ranks: Ints
    """Copies in the order of their ranks; where each rank begins; which rank it is."""
    over_X: Floats
    """Load above the limit; less than 0 is room."""
    tolerance_X: Floats
    layer_X: Ints
    stuck_L: npt.NDArray[np.bool_]

    @classmethod
    def of(
        cls,
        load_LED: LoadLED,
        slots_LRS: SlotsLRS,
        domains_R: DomainsR,
        token_LRS: Floats,
        limit_LR: Floats,
    ) -> _Flow:
        num_layers, num_ranks, _ = slots_LRS.shape
        num_experts, num_domains = load_LED.shape[1:]
        layer_N, rank_N, slot_N = np.nonzero(slots_LRS >= 0)
        expert_N = layer_N * num_experts + slots_LRS[layer_N, rank_N, slot_N]
        shared_N = np.bincount(expert_N, minlength=num_layers * num_experts)[expert_N] > 1
        key_N = expert_N * num_domains + domains_R[rank_N]
        order = np.flatnonzero(shared_N)[np.argsort(key_N[shared_N], kind="stable")]
        layer_N, rank_N, slot_N, key_N = layer_N[order], rank_N[order], slot_N[order], key_N[order]
        at_N = (layer_N, rank_N, slot_N)
        key_J, start_J, domain_N = np.unique(key_N, return_index=True, return_inverse=True)
        _, start_M, expert_J = np.unique(
            key_J // num_domains, return_index=True, return_inverse=True
        )
        token_N = token_LRS[at_N]
        node_N = layer_N * num_ranks + rank_N
        by_rank_N = np.argsort(node_N, kind="stable")
        ranks, rank_start = np.unique(node_N[by_rank_N], return_index=True)
        layer_X = np.repeat(np.arange(num_layers), num_ranks)
        return cls(
            at_N=at_N,
            token_N=token_N,
            rank_N=node_N,
            domain_N=domain_N,
            domain_start_J=start_J,
            expert_J=expert_J,
            expert_start_M=start_M,
            served_J=np.bincount(domain_N, token_N, len(key_J)).astype(np.float64),
            wanted_J=load_LED.reshape(-1)[key_J],
            leave_J=np.zeros_like(key_J),
            enter_J=np.zeros_like(key_J),
            by_rank_N=by_rank_N,
            rank_start=rank_start,
            ranks=ranks,
            over_X=(token_LRS.sum(axis=2) - limit_LR).reshape(-1),
            tolerance_X=TOLERANCE * load_LED.sum(axis=(1, 2))[layer_X],
            layer_X=layer_X,
            stuck_L=np.zeros(num_layers, dtype=np.bool_),
        )

    def run(self, max_rounds: int) -> int:
        """Go on until at least half of the layers are finished; returns the rounds it took."""
        for done in range(max_rounds):
            if len(self.unfinished()) * 2 <= len(self.stuck_L):
                return max(done, 1)
            self._round()
        return max_rounds

    def unfinished(self) -> Ints:
        over_L = np.zeros(len(self.stuck_L), dtype=np.bool_)
        over_L[self.layer_X[self.over_X > self.tolerance_X]] = True
        return np.flatnonzero(over_L & ~self.stuck_L)

    def tokens(self, token_LRS: Floats) -> Floats:
        token_LRS[self.at_N] = np.maximum(self.token_N, 0.0)
        return token_LRS

    def _round(self) -> None:
        """Find the cheapest chains to every rank; use those that end at the nearest room."""
        num_layers = len(self.stuck_L)
        if not len(self.rank_N):
            self.stuck_L[:] = True
            return
        cost_X, into_X, from_X = self.chains()
        room_X = np.where(cost_X < _FAR, -self.over_X, 0.0)
        open_X = room_X > self.tolerance_X
        nearest_L = np.full(num_layers, _FAR)
        np.minimum.at(nearest_L, self.layer_X[open_X], cost_X[open_X])
        over_L = np.zeros(num_layers, dtype=np.bool_)
        over_L[self.layer_X[self.over_X > self.tolerance_X]] = True
        self.stuck_L |= over_L & (nearest_L == _FAR)
        end_E = np.flatnonzero(open_X & (cost_X == nearest_L[self.layer_X]))
        end_E = self._needed(end_E, self._roots(into_X, from_X)[end_E])
        # The n-th end of each layer, for all layers at once.
        layer_E = self.layer_X[end_E]
        turn_E = np.arange(len(end_E)) - np.searchsorted(layer_E, layer_E)
        for turn in range(int(turn_E.max(initial=-1)) + 1):
            self._hand_on(end_E[turn_E == turn], into_X, from_X)

    def _roots(self, into_X: Ints, from_X: Ints) -> Ints:
        """The rank at which the chain to each rank starts."""
        root_X = np.where(into_X >= 0, self.rank_N[from_X], np.arange(len(into_X)))
        for _ in range(len(into_X).bit_length()):
            root_X = root_X[root_X]
        return root_X

    def _needed(self, end_E: Ints, root_E: Ints) -> Ints:
        """The ends with most room that suffice for what their root has too much, by layer."""
        order = np.lexsort((end_E, self.over_X[end_E], root_E))
        end_E, root_E = end_E[order], root_E[order]
        room_E = np.cumsum(-self.over_X[end_E])
        first_E = np.searchsorted(root_E, root_E)
        before_E = room_E + self.over_X[end_E]
        before_E -= before_E[first_E]
        end_E = end_E[before_E < SPARE_ENDS * self.over_X[root_E]]
        return end_E[np.argsort(self.layer_X[end_E], kind="stable")]

    def chains(self) -> tuple[Ints, Ints, Ints]:
        """Crossings of the cheapest chain from a rank that is too full to each rank, and its last
        link: the copy that takes tokens there, and the copy it takes them from."""
        num_copies, num_domains = len(self.rank_N), len(self.expert_J)
        excess_J = self.served_J - self.wanted_J
        tolerance_J = self.tolerance_X[self.rank_N[self.domain_start_J]]
        self.leave_J = np.where(excess_J > tolerance_J, 0, 1)
        self.enter_J = np.where(excess_J < -tolerance_J, -1, 0)
        gives_N = self.token_N > self.tolerance_X[self.rank_N]
        copies, domains = np.arange(num_copies), np.arange(num_domains)
        cost_X = np.where(self.over_X > self.tolerance_X, 0, _FAR)
        into_X = np.full(len(cost_X), _NONE)
        from_X = np.full(len(cost_X), _NONE)
        if not num_copies:
            return cost_X, into_X, from_X
        for _ in range(len(cost_X) // len(self.stuck_L)):
            # Cost and number in one integer: the least of them is the cheapest, then the first.
            give_N = np.where(gives_N, cost_X[self.rank_N], _FAR)
            give_J, giver_J = np.divmod(
                np.minimum.reduceat(give_N * num_copies + copies, self.domain_start_J), num_copies
            )
            leave_M, domain_M = np.divmod(
                np.minimum.reduceat(
                    (give_J + self.leave_J) * num_domains + domains, self.expert_start_M
                ),
                num_domains,
            )
            abroad_J = leave_M[self.expert_J] + self.enter_J
            take_J = np.minimum(give_J, abroad_J)
            giver_J = np.where(give_J <= abroad_J, giver_J, giver_J[domain_M[self.expert_J]])
            take_N = take_J[self.domain_N] * num_copies + copies
            take_R, taker_R = np.divmod(
                np.minimum.reduceat(take_N[self.by_rank_N], self.rank_start), num_copies
            )
            better_R = (take_R < cost_X[self.ranks]) & (take_R < _FAR - 1)
            if not better_R.any():
                return cost_X, into_X, from_X
            rank, taker = self.ranks[better_R], taker_R[better_R]
            cost_X[rank] = take_R[better_R]
            into_X[rank] = taker
            from_X[rank] = giver_J[self.domain_N[taker]]
        # More links than ranks: only rounding can close a chain. Nothing is taken from any.
        return np.full(len(cost_X), _FAR), np.full(len(cost_X), _NONE), from_X

    def _hand_on(self, end_B: Ints, into_X: Ints, from_X: Ints) -> None:
        """Move what the chains that end at these ranks, one of each layer, can carry."""
        amount_B = np.maximum(-self.over_X[end_B], 0.0)
        rank_B = end_B.copy()
        links: list[tuple[npt.NDArray[np.bool_], Ints, Ints]] = []
        while True:
            linked_B = into_X[rank_B] >= 0
            if not linked_B.any():
                break
            into_B, from_B = into_X[rank_B], from_X[rank_B]
            enter_B, leave_B = self.domain_N[into_B], self.domain_N[from_B]
            # Beyond these amounts the crossing is not the one that the chain was chosen for.
            extra_B = self.served_J[leave_B] - self.wanted_J[leave_B]
            lack_B = self.wanted_J[enter_B] - self.served_J[enter_B]
            bound_B = np.minimum(
                np.where(self.leave_J[leave_B] == 0, np.maximum(extra_B, 0.0), np.inf),
                np.where(self.enter_J[enter_B] != 0, np.maximum(lack_B, 0.0), np.inf),
            )
            bound_B = np.where(enter_B == leave_B, np.inf, bound_B)
            bound_B = np.minimum(bound_B, self.token_N[from_B])
            amount_B = np.where(linked_B, np.minimum(amount_B, bound_B), amount_B)
            links.append((linked_B, into_B, from_B))
            rank_B = np.where(linked_B, self.rank_N[from_B], rank_B)
        amount_B = np.minimum(amount_B, np.maximum(self.over_X[rank_B], 0.0))
        for linked_B, into_B, from_B in links:
            into_B, from_B = into_B[linked_B], from_B[linked_B]
            moved_B = amount_B[linked_B]
            self.token_N[from_B] -= moved_B
            self.token_N[into_B] += moved_B
            self.served_J[self.domain_N[from_B]] -= moved_B
            self.served_J[self.domain_N[into_B]] += moved_B
        self.over_X[rank_B] -= amount_B
        self.over_X[end_B] += amount_B
