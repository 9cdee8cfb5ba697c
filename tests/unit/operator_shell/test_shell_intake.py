"""Which deployments an event is about, and how urgent it is."""

from __future__ import annotations

from typing import Any

from moe_api import names
from moe_operator.context import Key
from moe_operator.intake import Intake


class Wishes:
    def __init__(self) -> None:
        self.asked: list[tuple[Key, bool]] = []
        self.delays: list[float] = []

    def add(self, key: Key, *, delay_seconds: float = 0.0, urgent: bool = False) -> None:
        self.asked.append((key, urgent))
        self.delays.append(delay_seconds)

    def taken(self) -> list[tuple[Key, bool]]:
        taken, self.asked = sorted(self.asked), []
        return taken


A, B = Key("n", "a"), Key("n", "b")


def intake() -> tuple[Intake, Wishes]:
    wishes = Wishes()
    return Intake(wishes, jitter=lambda: 0.5), wishes


def pod(deployment: str | None = "a", **more: Any) -> dict[str, Any]:
    labels = {names.LABEL_DEPLOYMENT: deployment} if deployment else {}
    metadata = {"namespace": "n", "name": "p", "labels": labels, **more.pop("metadata", {})}
    return {"kind": "Pod", "metadata": metadata, **more}


def node(name: str = "w1", ready: bool = True, **spec: Any) -> dict[str, Any]:
    status = {"conditions": [{"type": "Ready", "status": "True" if ready else "Unknown"}]}
    return {"metadata": {"name": name, "labels": {"zone": "z"}}, "spec": spec, "status": status}


def test_a_deployment_asks_for_itself_also_when_it_is_deleted() -> None:
    door, wishes = intake()
    door.deployment(None, "n", "a")
    door.deployment("DELETED", "n", "a")
    assert wishes.taken() == [(A, False), (A, False)]


def test_a_child_asks_for_the_deployment_in_its_label() -> None:
    door, wishes = intake()
    door.child("MODIFIED", pod("a"))
    door.child("MODIFIED", pod(None))
    assert wishes.taken() == [(A, False)]


def test_a_pod_that_ends_is_urgent() -> None:
    door, wishes = intake()
    door.child("DELETED", pod())
    door.child("MODIFIED", pod(metadata={"deletionTimestamp": "2026-01-01T00:00:00Z"}))
    door.child("MODIFIED", pod(status={"phase": "Failed"}))
    door.child("MODIFIED", pod(status={"phase": "Succeeded"}))
    door.child("MODIFIED", pod(status={"phase": "Running"}))
    assert [urgent for _, urgent in wishes.asked] == [True, True, True, True, False]


def test_a_nodes_heartbeat_asks_for_nothing_but_a_cordon_or_loss_for_everything() -> None:
    door, wishes = intake()
    door.deployment(None, "n", "a")
    door.deployment(None, "n", "b")
    door.node(None, node())
    wishes.taken()
    door.node("MODIFIED", node())
    assert wishes.taken() == []
    door.node("MODIFIED", node(unschedulable=True))
    assert wishes.taken() == [(A, False), (B, False)]
    door.node("MODIFIED", node(ready=False, unschedulable=True))
    assert wishes.taken() == [(A, True), (B, True)]
    door.node("DELETED", node())
    assert wishes.taken() == [(A, True), (B, True)]


def test_a_resync_asks_for_all_that_are_there_and_once_more_for_those_that_are_gone() -> None:
    door, wishes = intake()
    door.deployment(None, "n", "a")
    wishes.taken()
    door.resync([B], spread_seconds=10.0)
    assert wishes.taken() == [(A, False), (B, False)]
    assert wishes.delays[-1] == 5.0
    door.resync([B], spread_seconds=10.0)
    assert wishes.taken() == [(B, False)]


def test_f04_a_watch_listed_anew_asks_for_everything_known() -> None:
    door, wishes = intake()
    door.deployment(None, "n", "a")
    wishes.taken()
    door.relisted()
    assert wishes.taken() == [(A, False)]
