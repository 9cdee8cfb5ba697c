"""What a pass decided about experts, as it is written into status.

Pure. A rebalance is one record from its decision to what was measured of it; a refusal is one with
its reason. Neighbours: `rebalance` and `evacuation` decide, `decisions` keeps the list.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from moe_api.status import Decision as DecisionStatus
from moe_api.worker import WorkerState
from moe_operator.balance import Trip
from moe_operator.texts import cut
from moe_placement.decision.decide import Decision, Verdict

_WORDS: dict[Verdict, Literal["Applied", "Recommended", "Skipped", "Deferred", "Aborted"]] = {
    Verdict.APPLIED: "Applied",
    Verdict.RECOMMENDED: "Recommended",
    Verdict.SKIPPED: "Skipped",
    Verdict.DEFERRED: "Deferred",
    Verdict.ABORTED: "Aborted",
}


def refusal(decision: Decision | None, group: str, now: str) -> DecisionStatus | None:
    """A decision against moving anything; None when there is none."""
    if decision is None or decision.verdict is Verdict.APPLIED:
        return None
    figures = decision.figures
    return DecisionStatus(
        time=now,
        group=group,
        verdict=_WORDS[decision.verdict],
        reason=decision.reason,
        predicted_gain=None if figures is None else round(figures.gain, 4),
        moves=None if figures is None else figures.moves,
        bytes=None if figures is None else figures.bytes,
        waves=None if figures is None else figures.waves,
        message=cut(message(decision)),
    )


def message(decision: Decision) -> str:
    """For people, with what was wanted of the plan and could not be had."""
    given_up = () if decision.figures is None else decision.figures.given_up
    return "; ".join((decision.message, *given_up))


def rebalanced(trip: Trip | None, group: str) -> DecisionStatus | None:
    """The rebalance under way or made last, with all that is known of it by now."""
    if trip is None:
        return None
    gain, stall = trip.measured_gain, trip.stall_millis
    return DecisionStatus(
        time=trip.started,
        group=group,
        verdict="Applied",
        reason=trip.reason,
        predicted_gain=None if trip.figures is None else round(trip.figures.gain, 4),
        moves=trip.moves,
        bytes=trip.bytes if trip.bytes_by_epoch else None,
        waves=len(trip.bytes_by_epoch) or None,
        measured_gain=None if gain is None else round(gain, 3),
        measured_stall_millis=None if stall is None else round(stall, 1),
        message=cut(trip.message),
    )


def abandoned(
    epoch: int, in_force: int, states: Sequence[WorkerState], group: str, now: str
) -> DecisionStatus:
    errors = [s.migration.error for s in states if s.migration and s.migration.error]
    return DecisionStatus(
        time=now,
        group=group,
        verdict="Aborted",
        reason="WaveAbandoned",
        message=cut(
            f"epoch {epoch} was abandoned, epoch {in_force} stays in force"
            + (f": {errors[0]}" if errors else "")
        ),
    )
