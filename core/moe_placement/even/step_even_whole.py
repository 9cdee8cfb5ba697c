"""Making a placement whole again: what must be so before anything is improved.

After a loss, a drain or a change of slots, experts may lack copies and ranks may hold more than
they shall. Only layers with such a fault are touched, one expert after another: first what is too
much on a rank goes, then what is missing comes, the most loaded experts first, to the lightest
ranks. Neighbour: `step_even`, which improves on it.

Shapes: L layers, E logical experts, R ranks, S physical slots a rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moe_api.plan import SlotsLRS
from moe_placement.capacity import SlotsR, SpeedsR
from moe_placement.copy_limits import CopyLimits
from moe_placement.placement import copies
from moe_placement.score import LoadLE

LoadE = npt.NDArray[np.float64]
SlotsRS = npt.NDArray[np.int32]


def whole(
    load_LE: LoadLE, slots_LRS: SlotsLRS, slots_R: SlotsR, speeds_R: SpeedsR, limits: CopyLimits
) -> SlotsLRS:
    """The placement with at least one copy of each expert (as many as `limits` ask for, where ranks
    are left for them), at most `max_copies`, and no rank above its slots.

    Args:
        slots_R: together at least as many as there are experts.
    """
    counts_LE = copies(slots_LRS, load_LE.shape[1])
    wrong_L = (counts_LE < limits.min_copies).any(axis=1)
    wrong_L |= (counts_LE > limits.most(len(slots_R))).any(axis=1)
    wrong_L |= ((slots_LRS >= 0).sum(axis=2) > slots_R).any(axis=1)
    out_LRS = slots_LRS.copy()
    for layer in np.flatnonzero(wrong_L).tolist():
        repair = _Repair(load_LE[layer], out_LRS[layer], slots_R, speeds_R, limits)
        repair.trim_experts()
        repair.trim_ranks()
        repair.fill()
    return out_LRS


@dataclass(eq=False)
class _Repair:
    """One layer; `slots_RS` changes in place."""

    load_E: LoadE
    slots_RS: SlotsRS
    slots_R: SlotsR
    speeds_R: SpeedsR
    limits: CopyLimits

    def trim_experts(self) -> None:
        """Retires copies above the limit, on the fullest ranks first."""
        most = self.limits.most(len(self.slots_R))
        for expert in np.flatnonzero(self.counts() > most).tolist():
            while self.counts()[expert] > most:
                self.retire(
                    int(self.holders(expert)[self.levels()[self.holders(expert)].argmax()]), expert
                )

    def trim_ranks(self) -> None:
        """Ranks that hold more than their slots lose copies that can be spared, else send their
        lightest expert to the lightest rank with room."""
        for rank in np.flatnonzero(self.filled() > self.slots_R).tolist():
            while self.filled()[rank] > self.slots_R[rank]:
                if self.retire_spare(rank, least=self.limits.min_copies):
                    continue
                self.leave(rank)

    def leave(self, rank: int) -> None:
        """A step towards fewer experts on the rank: one goes elsewhere or, if no rank has room, a
        copy above the last one retires."""
        held = self.held(rank)
        for expert in held[np.argsort(self.shares()[held], kind="stable")].tolist():
            to = self.lightest(self.open() & ~self.holds(expert))
            if to is not None:
                self.retire(rank, expert)
                self.add(to, expert)
                return
        if self.retire_spare(rank, least=1):
            return
        # All slots are filled and some rank holds more, but experts fit: one has two copies.
        other = self.lightest(self.has_spare(1))
        assert other is not None
        self.retire_spare(other, least=1)

    def fill(self) -> None:
        """Missing copies come, those of experts without any first, the most loaded first."""
        for least in range(1, self.limits.min_copies + 1):
            missing = np.flatnonzero(self.counts() < least)
            for expert in missing[np.argsort(-self.load_E[missing], kind="stable")].tolist():
                self.bring(expert, least)

    def bring(self, expert: int, least: int) -> None:
        """One more copy: on a free slot, in place of a copy that can be spared, or where another
        expert can make room by going to a free slot."""
        strange_R = ~self.holds(expert) & (self.slots_R > 0)
        to = self.lightest(strange_R & self.open())
        if to is None:
            to = self.lightest(strange_R & self.has_spare(least))
            if to is not None:
                self.retire_spare(to, least)
        if to is None:
            for rank in np.flatnonzero(strange_R)[
                np.argsort(self.levels()[strange_R], kind="stable")
            ].tolist():
                if self.step_aside(rank):
                    to = rank
                    break
        if to is not None:
            self.add(to, expert)

    def step_aside(self, rank: int) -> bool:
        """Whether an expert of the rank could go to a free slot elsewhere; it has gone then."""
        for expert in self.held(rank).tolist():
            to = self.lightest(self.open() & ~self.holds(expert))
            if to is not None:
                self.retire(rank, expert)
                self.add(to, expert)
                return True
        return False

    def retire_spare(self, rank: int, least: int) -> bool:
        """Retires the rank's copy that matters least, of experts with more than `least` copies;
        whether there was one."""
        held = self.held(rank)
        spare = held[self.counts()[held] > least]
        if not len(spare):
            return False
        self.retire(rank, int(spare[(self.load_E[spare] / (self.counts()[spare] - 1)).argmin()]))
        return True

    def has_spare(self, least: int) -> npt.NDArray[np.bool_]:
        spare_E = np.append(self.counts() > least, False)
        return np.asarray(spare_E[self.slots_RS].any(axis=1))

    def lightest(self, of_R: npt.NDArray[np.bool_]) -> int | None:
        return int(np.where(of_R, self.levels(), np.inf).argmin()) if of_R.any() else None

    def levels(self) -> npt.NDArray[np.float64]:
        return np.asarray(np.append(self.shares(), 0.0)[self.slots_RS].sum(axis=1) / self.speeds_R)

    def shares(self) -> LoadE:
        return self.load_E / np.maximum(self.counts(), 1)

    def counts(self) -> npt.NDArray[np.int64]:
        return np.bincount(self.slots_RS[self.slots_RS >= 0], minlength=len(self.load_E))

    def filled(self) -> npt.NDArray[np.int64]:
        return np.asarray((self.slots_RS >= 0).sum(axis=1))

    def open(self) -> npt.NDArray[np.bool_]:
        return self.filled() < self.slots_R

    def holds(self, expert: int) -> npt.NDArray[np.bool_]:
        return np.asarray((self.slots_RS == expert).any(axis=1))

    def holders(self, expert: int) -> npt.NDArray[np.int64]:
        return np.flatnonzero(self.holds(expert))

    def held(self, rank: int) -> npt.NDArray[np.int64]:
        return np.sort(self.slots_RS[rank][self.slots_RS[rank] >= 0]).astype(np.int64)

    def retire(self, rank: int, expert: int) -> None:
        self.slots_RS[rank][self.slots_RS[rank] == expert] = -1

    def add(self, rank: int, expert: int) -> None:
        self.slots_RS[rank, int((self.slots_RS[rank] < 0).argmax())] = expert
