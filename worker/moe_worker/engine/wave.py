"""One epoch on its way into force on this rank: staged in a thread, wished away at its deadline.

Neighbours: `expert.migrate` does the work, `agreement` decides the outcome for all ranks.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from moe_api.plan import GroupPlan, SlotsLRS
from moe_api.worker import MigrationState
from moe_worker.expert import migrate
from moe_worker.expert.migrate import Staging
from moe_worker.expert.routing_table import RoutingTable

logger = logging.getLogger(__name__)


class Wave:
    def __init__(
        self,
        plan: GroupPlan,
        slots_LRS: SlotsLRS,
        now_seconds: float,
        on_progress: Callable[[], None],
    ) -> None:
        self.plan, self.slots_LRS = plan, slots_LRS
        self.table: RoutingTable | None = None
        """Built with the staging, so that the switch is one assignment."""
        self.error: str | None = None
        self.called_off = threading.Event()
        self._deadline_seconds = now_seconds + plan.limits.deadline_seconds
        self._on_progress = on_progress
        self._staging: Staging | None = None

    @property
    def epoch(self) -> int:
        return self.plan.epoch

    @property
    def complete(self) -> bool:
        return self.table is not None

    def start(self, staging: Staging, build_table: Callable[[], RoutingTable]) -> None:
        self._staging = staging
        threading.Thread(
            target=self._run, args=(staging, build_table), name=f"stage-{self.epoch}", daemon=True
        ).start()

    def is_hopeless(self, now_seconds: float) -> bool:
        """Whether this rank wants the epoch abandoned."""
        return self.error is not None or now_seconds > self._deadline_seconds

    def state(self, stall_millis: float | None = None, error: str | None = None) -> MigrationState:
        staging = self._staging
        return MigrationState(
            epoch=self.epoch,
            bytes=staging.num_bytes if staging else 0,
            moves_done=staging.moves_done if staging else 0,
            moves_total=staging.moves_total if staging else 0,
            stall_millis=stall_millis,
            error=error or self.error,
        )

    def _run(self, staging: Staging, build_table: Callable[[], RoutingTable]) -> None:
        try:
            staging.run()
            self.table = build_table()
        except migrate.Cancelled:
            return
        except Exception as error:
            if self.called_off.is_set():
                return
            # Becomes a wish to abandon: the group decides, and the operator reads why.
            logger.exception("epoch %d cannot be staged", self.epoch)
            self.error = str(error)
        self._on_progress()


def conflict(current_LRS: SlotsLRS, wave_LRS: SlotsLRS) -> str | None:
    """Why a wave does not fit the placement in force, None when it does: it may fill only slots
    that are free, and give up others."""
    if wave_LRS.shape != current_LRS.shape:
        return f"slots {list(wave_LRS.shape)} where {list(current_LRS.shape)} are in force"
    for layer in range(len(current_LRS)):
        taken = (current_LRS[layer] >= 0) & (wave_LRS[layer] >= 0)
        clash = taken & (current_LRS[layer] != wave_LRS[layer])
        if clash.any():
            rank, slot = (int(x[0]) for x in clash.nonzero())
            return (
                f"layer {layer} rank {rank} slot {slot} holds expert "
                f"{current_LRS[layer, rank, slot]}, the wave wants {wave_LRS[layer, rank, slot]} "
                "there; a wave may only fill free slots"
            )
    return None
