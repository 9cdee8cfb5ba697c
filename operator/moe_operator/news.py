"""What changed between two statuses and is worth an event: ranks, coverage, moves, drains.

Pure; told once, when the new status is written. The event names are the contract's.
Neighbours: `status` (both sides), `evidence` (losses), `reconcile` (records them).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from moe_api.conditions import ConditionType, find
from moe_api.status import Decision, MoEDeploymentStatus
from moe_operator.acceptance import MODEL_REASONS
from moe_operator.evidence import Loss


class News(NamedTuple):
    severity: Literal["Normal", "Warning"]
    reason: str
    note: str


def news(old: MoEDeploymentStatus, new: MoEDeploymentStatus, losses: Sequence[Loss]) -> list[News]:
    """Events for the change from `old` to `new`."""
    told = [
        News("Warning", "RankLost", f"group {loss.group}, member {loss.member}: {loss.why}")
        for loss in losses
    ]
    told += _ranks(old, new)
    told += _coverage(old, new)
    told += _model(old, new)
    told += _decisions(old.decisions, new.decisions)
    return told


def _ranks(old: MoEDeploymentStatus, new: MoEDeploymentStatus) -> Iterable[News]:
    before = {group.name: group.ranks for group in old.groups}
    for group in new.groups:
        was = before.get(group.name)
        if was is None:
            continue
        if group.ranks.serving > was.serving and group.generation > 0:
            count = f"{group.ranks.serving} of {group.ranks.desired} ranks serve"
            note = f"{group.name}: {count} in generation {group.generation}"
            yield News("Normal", "RankJoined", note)
        if group.ranks.leaving > 0 and was.leaving == 0:
            yield News("Normal", "DrainStarted", f"{group.name}: {group.ranks.leaving} rank(s)")
        if group.ranks.leaving == 0 and was.leaving > 0:
            yield News("Normal", "DrainCompleted", f"{group.name}: no rank drains any more")


def _coverage(old: MoEDeploymentStatus, new: MoEDeploymentStatus) -> Iterable[News]:
    was = find(old.conditions, ConditionType.EXPERTS_COVERED)
    now = find(new.conditions, ConditionType.EXPERTS_COVERED)
    if was is None or now is None:
        return
    if was.status == "True" and now.status == "False":
        yield News("Warning", "ExpertUncovered", now.message)
    had_holes = old.placement is not None and old.placement.uncovered
    if was.status == "False" and now.status == "True" and had_holes:
        yield News("Normal", "CoverageRestored", now.message)


def _model(old: MoEDeploymentStatus, new: MoEDeploymentStatus) -> Iterable[News]:
    was = find(old.conditions, ConditionType.ACCEPTED)
    now = find(new.conditions, ConditionType.ACCEPTED)
    if now is None or now.status == "True" or now.reason not in set(MODEL_REASONS):
        return
    if was is None or (was.status, was.reason) != (now.status, now.reason):
        yield News("Warning", "ModelLoadFailed", f"{now.reason}: {now.message}")


def _decisions(old: Sequence[Decision], new: Sequence[Decision]) -> Iterable[News]:
    before = {(d.group, d.time, d.verdict, d.reason): d for d in old}
    for decision in new:
        was = before.get((decision.group, decision.time, decision.verdict, decision.reason))
        if decision.verdict == "Applied":
            done = decision.bytes is not None and (was is None or was.bytes is None)
            if done:
                yield News("Normal", "RebalanceApplied", f"{decision.group}: {decision.message}")
        elif was is None and decision.verdict == "Aborted":
            yield News("Warning", "RebalanceAborted", f"{decision.group}: {decision.message}")
        elif was is None and decision.reason not in _QUIET:
            yield News("Normal", "RebalanceSkipped", f"{decision.group}: {decision.message}")


_QUIET = ("ModeOff", "NoTraffic", "WithinTarget")
"""Nothing was to be done: no event."""
