"""What each rank really served, read from the workers' control ports; the demo's own
measurement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import httpx
import numpy as np
import numpy.typing as npt

from examples.demo.forward import Forward
from moe_api.load import LoadReport
from moe_api.names import CONTROL_LOAD, CONTROL_PORT, CONTROL_STATE
from moe_api.plan import GroupPlan
from moe_api.worker import WorkerState
from moe_placement import score


@dataclass(frozen=True)
class Reading:
    """Cumulative counters of all ranks, in the order of the forwards."""

    epochs: tuple[int, ...]
    served_LR: npt.NDArray[np.float64]
    """Tokens that each rank's slots received."""
    routed_LE: npt.NDArray[np.float64]
    """Tokens that chose each expert."""


class Workers:
    """Control API of the group's workers, through their port-forwards."""

    def __init__(self, forwards: Sequence[Forward], token: str) -> None:
        self._forwards = forwards
        self._client = httpx.Client(
            headers={"Authorization": f"Bearer {token}"}, timeout=10, trust_env=False
        )

    def read(self) -> Reading:
        reports = [
            LoadReport.from_json(self._get(forward, CONTROL_LOAD)) for forward in self._forwards
        ]
        served = [np.asarray(report.served, dtype=np.float64).sum(axis=1) for report in reports]
        routed = sum(np.asarray(report.routed, dtype=np.float64) for report in reports)
        epochs = tuple(report.epoch for report in reports)
        return Reading(epochs, np.stack(served, axis=1), np.asarray(routed))

    def states(self) -> list[WorkerState]:
        return [
            WorkerState.from_json(self._get(forward, CONTROL_STATE)) for forward in self._forwards
        ]

    def close(self) -> None:
        self._client.close()

    def _get(self, forward: Forward, route: str) -> bytes:
        answer = self._client.get(forward.url(CONTROL_PORT) + route)
        answer.raise_for_status()
        return answer.content


def assignments(since: Reading, now: Reading) -> int:
    """Tokens served between two readings in the busiest layer, summed over ranks."""
    return int((now.served_LR - since.served_LR).sum(axis=1).max())


def predicted(plan: GroupPlan, since: Reading, now: Reading) -> float | None:
    """Imbalance that `plan` promises for what was routed between two readings."""
    load_LE = now.routed_LE - since.routed_LE
    found = score.imbalance(score.rank_loads(plan.slots(), plan.fractions(), load_LE))
    return None if found is None else found.worst


def imbalance(since: Reading, now: Reading) -> float | None:
    """Worst layer's largest ÷ mean rank load between two readings; None without tokens."""
    found = score.imbalance(now.served_LR - since.served_LR)
    return None if found is None else found.worst
