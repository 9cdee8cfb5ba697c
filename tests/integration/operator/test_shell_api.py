"""The door to the API against the real API server: apply, UIDs, statuses, events, leases, size."""

from __future__ import annotations

import contextlib
import datetime
import secrets
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from devcluster.api import ApiError
from devcluster.cluster import Cluster as ApiServerInstance
from devcluster.waiting import wait_until
from moe_api import names
from moe_api.plan import GroupPlan, Member, encode_layers
from moe_operator.api_server import ApiServer
from moe_operator.cluster import Cluster, connect, load_credentials
from moe_operator.context import Clock
from moe_operator.errors import AlreadyExists, Conflict, Refused, SetupError
from moe_operator.events import EventRecorder, Series
from moe_operator.lease import Lease
from moe_operator.process import system_clock
from moe_operator.settings import ClientSettings, LeaseSettings

pytestmark = pytest.mark.apiserver
PATIENCE_SECONDS = 20.0
OTHER_UID = "00000000-0000-0000-0000-000000000000"


@pytest.fixture(scope="module")
def api(custom_resources: ApiServerInstance) -> ApiServer:
    send = connect(load_credentials(str(custom_resources.kubeconfig)))
    return ApiServer(send, ClientSettings(), time.monotonic)


@pytest.fixture
def door(api: ApiServer) -> Cluster:
    return Cluster(api, lambda: True)


def deployment(namespace: str, name: str = "d", **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": names.API_GROUP_VERSION,
        "kind": names.DEPLOYMENT_KIND,
        "metadata": {"namespace": namespace, "name": name},
        "spec": {"model": {"uri": "file:///models/tiny"}, **spec},
    }


def pod(namespace: str, name: str = "p", deployment: str = "d") -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "namespace": namespace, "name": name, "labels": {names.LABEL_DEPLOYMENT: deployment},
        },
        "spec": {"containers": [{"name": "worker", "image": "moe.test/none:1"}]},
    }  # fmt: skip


def test_apply_creates_changes_and_takes_back_only_what_is_ours(
    door: Cluster, api_server: ApiServerInstance, namespace: str
) -> None:
    service = {
        "apiVersion": "v1", "kind": "Service", "metadata": {"namespace": namespace, "name": "s"},
        "spec": {"ports": [{"name": "http", "port": 8000}], "selector": {"a": "b"}},
    }  # fmt: skip
    door.apply(service)
    path = f"/api/v1/namespaces/{namespace}/services/s"
    api_server.api.patch(path, {"metadata": {"annotations": {"somebody": "else"}}})
    service["spec"]["selector"] = {"a": "c"}  # type: ignore[index]
    changed = door.apply(service)
    assert changed["spec"]["selector"] == {"a": "c"}
    assert changed["metadata"]["annotations"] == {"somebody": "else"}
    again = door.apply(service)
    assert again["metadata"]["resourceVersion"] == changed["metadata"]["resourceVersion"]
    managers = {m["manager"] for m in again["metadata"]["managedFields"]}
    assert names.FIELD_MANAGER in managers


def test_pods_are_created_once_listed_by_label_and_deleted_by_uid(
    door: Cluster, namespace: str
) -> None:
    made = door.create_pod(pod(namespace))
    with pytest.raises(AlreadyExists):
        door.create_pod(pod(namespace))
    door.create_pod(pod(namespace, "other", deployment="e"))
    assert [p["metadata"]["name"] for p in door.list_pods(namespace, "d")] == ["p"]
    assert door.delete_pod(namespace, "p", OTHER_UID, 0) is False
    assert door.get("Pod", namespace, "p") is not None
    assert door.delete_pod(namespace, "p", made["metadata"]["uid"], 0) is True
    assert door.get("Pod", namespace, "p") is None
    assert door.delete_pod(namespace, "p", made["metadata"]["uid"], 0) is False
    assert door.pod_log_tail(namespace, "p", 10) is None
    assert door.pod_log_tail(namespace, "other", 10) is None  # never started


def test_a_status_is_fenced_by_version_and_a_vanished_object_is_quiet(
    door: Cluster, namespace: str
) -> None:
    made = door.apply(deployment(namespace))
    kind, version = names.DEPLOYMENT_KIND, made["metadata"]["resourceVersion"]
    written = door.apply_status(kind, namespace, "d", {"ready": "0/1"}, version)
    assert written is not None
    assert written["status"]["ready"] == "0/1"
    assert written["spec"] == made["spec"]
    with pytest.raises(Conflict):
        door.apply_status(kind, namespace, "d", {"ready": "1/1"}, version)
    assert door.apply_status(kind, namespace, "d", {"ready": "1/1"}) is not None
    last = door.get(kind, namespace, "d")
    assert last is not None
    door.delete(kind, namespace, "d", made["metadata"]["uid"])
    assert door.apply_status(kind, namespace, "d", {"ready": "1/1"}) is None
    door.apply(deployment(namespace))  # another one of the same name
    with pytest.raises(Conflict):
        door.apply_status(
            kind, namespace, "d", {"ready": "1/1"}, last["metadata"]["resourceVersion"]
        )


def test_what_the_api_server_will_not_take_is_refused_in_its_own_words(
    door: Cluster, namespace: str
) -> None:
    with pytest.raises(Refused, match=r"replicas") as caught:
        door.apply(deployment(namespace, replicas=-1))
    assert caught.value.reason == "Invalid"
    with pytest.raises(Refused) as caught:
        door.create_pod({**pod(namespace), "spec": {"containers": []}})
    assert caught.value.status == 422


def test_a_full_quota_is_a_refusal_by_name(
    door: Cluster, api_server: ApiServerInstance, namespace: str
) -> None:
    quota = {"metadata": {"name": "q"}, "spec": {"hard": {"pods": "0"}}}
    path = f"/api/v1/namespaces/{namespace}/resourcequotas"
    api_server.api.request("POST", path, quota)
    wait_until(
        lambda: "hard" in api_server.api.get(f"{path}/q").get("status", {}), 30, "a quota in force"
    )
    with pytest.raises(Refused, match="exceeded quota") as caught:
        door.create_pod(pod(namespace))
    assert (caught.value.status, caught.value.reason) == (403, "Forbidden")


def test_lists_longer_than_a_page_are_whole(api: ApiServer, namespace: str) -> None:
    api = ApiServer(api._send, replace(ClientSettings(), list_page=2), time.monotonic)
    door = Cluster(api, lambda: True, (namespace,))
    for number in range(5):
        door.apply(deployment(namespace, f"d{number}"))
    assert sorted(door.list_deployments()) == [(namespace, f"d{n}") for n in range(5)]


def test_f02_a_huge_plan_and_a_huge_template_are_accepted_and_leave_no_annotation(
    door: Cluster, namespace: str
) -> None:
    """61 layers × 288 slots; a pod template of 100 kB."""
    comment = {"metadata": {"annotations": {f"note-{n}": "x" * 1000 for n in range(100)}}}
    made = door.apply(deployment(namespace, worker={"podTemplate": comment}))
    assert not made["metadata"].get("annotations")
    slots = np.arange(61 * 288, dtype=np.int32).reshape(61, 32, 9) % 256
    members = [
        Member(id=n, pod=f"d-g0-m{n}", uid="u" * 36, address="10.0.0.1", incarnation="i" * 32)
        for n in range(32)
    ]
    plan = GroupPlan(
        namespace=namespace, deployment="d", group=0, leader_epoch=7, generation=1, epoch=1,
        members=members, layers=encode_layers(slots),
    ).sealed()  # fmt: skip
    placement = {
        "apiVersion": names.API_GROUP_VERSION,
        "kind": names.PLACEMENT_KIND,
        "metadata": {
            "namespace": namespace, "name": "d-g0", "labels": {names.LABEL_DEPLOYMENT: "d"},
        },
        "spec": plan.to_wire(),
    }  # fmt: skip
    stored = door.apply(placement)
    assert GroupPlan.model_validate(stored["spec"]) == plan
    assert not stored["metadata"].get("annotations")
    assert [p["metadata"]["name"] for p in door.list_placements(namespace, "d")] == ["d-g0"]
    assert door.stored_leader_epoch() >= 7


def test_events_are_accepted_and_grow_into_a_series(
    door: Cluster, api_server: ApiServerInstance, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moe_operator.events.REPEAT_SECONDS", 0.0)
    made = door.apply(deployment(namespace))
    clock = Clock(time.monotonic, lambda: datetime.datetime.now(datetime.UTC))
    recorder = EventRecorder(door, clock, "operator-0")
    recorder.start()
    path = f"/apis/events.k8s.io/v1/namespaces/{namespace}/events"

    def counts() -> list[int]:
        return [e.get("series", {}).get("count", 1) for e in api_server.api.get(path)["items"]]

    recorder.record(made, "Warning", "RankLost", "rank 1 of group 0 is gone")
    wait_until(lambda: counts() == [1], PATIENCE_SECONDS, "the first event")
    recorder.record(made, "Warning", "RankLost", "rank 1 of group 0 is gone")
    wait_until(lambda: counts() == [2], PATIENCE_SECONDS, "a series of two")
    recorder.stop(PATIENCE_SECONDS)
    assert "RankLost" in api_server.kubectl("-n", namespace, "describe", "moed", "d")
    assert Series().dropped == 0


class Candidate:
    """One operator's lease, with what it was told."""

    def __init__(self, api: ApiServer, settings: LeaseSettings, name: str, skew: int = 0) -> None:
        real = system_clock()
        shift = datetime.timedelta(seconds=skew)
        self.elected, self.lost = threading.Event(), threading.Event()
        self.transitions, self.why = -1, ""
        self.lease = Lease(
            api, settings, name, Clock(real.monotonic, lambda: real.wall() + shift),
            self._won, self._gave_up,
        )  # fmt: skip

    def _won(self, transitions: int) -> None:
        self.transitions = transitions
        self.elected.set()

    def _gave_up(self, why: str) -> None:
        self.why = why
        self.lost.set()


@pytest.fixture
def lease_settings(namespace: str) -> LeaseSettings:
    return LeaseSettings(
        namespace=namespace, name=f"l{secrets.token_hex(3)}",
        duration_seconds=3, renew_deadline_seconds=2, retry_seconds=0.3,
    )  # fmt: skip


def test_f06_a_standby_with_a_wrong_clock_waits_and_a_release_is_taken_at_once(
    api: ApiServer, lease_settings: LeaseSettings
) -> None:
    first = Candidate(api, lease_settings, "first")
    ahead = Candidate(api, lease_settings, "ahead", skew=300)
    first.lease.start()
    assert first.elected.wait(PATIENCE_SECONDS)
    ahead.lease.start()
    assert not ahead.elected.wait(2 * lease_settings.duration_seconds)
    assert first.lease.may_write()
    assert not ahead.lease.may_write()
    first.lease.stop(PATIENCE_SECONDS)
    assert not first.lease.may_write()
    assert ahead.elected.wait(PATIENCE_SECONDS)
    assert (first.transitions, ahead.transitions) == (0, 1)
    ahead.lease.stop(PATIENCE_SECONDS)


def test_a_leader_whose_lease_is_taken_gives_up_and_one_whose_lease_is_deleted_restores_it(
    api: ApiServer, api_server: ApiServerInstance, lease_settings: LeaseSettings
) -> None:
    path = (
        f"/apis/coordination.k8s.io/v1/namespaces/{lease_settings.namespace}"
        f"/leases/{lease_settings.name}"
    )
    robbed = Candidate(api, lease_settings, "robbed")
    robbed.lease.start()
    assert robbed.elected.wait(PATIENCE_SECONDS)
    api_server.api.patch(path, {"spec": {"holderIdentity": "thief"}})
    assert robbed.lost.wait(PATIENCE_SECONDS)
    assert "thief" in robbed.why
    assert not robbed.lease.may_write()

    api_server.api.patch(path, {"spec": {"holderIdentity": ""}})
    next_one = Candidate(api, lease_settings, "next")
    next_one.lease.start()
    assert next_one.elected.wait(PATIENCE_SECONDS)
    api_server.api.request("DELETE", path)

    def restored() -> bool:
        with contextlib.suppress(ApiError):
            return bool(api_server.api.get(path)["spec"]["holderIdentity"] == "next")
        return False

    wait_until(restored, PATIENCE_SECONDS, "the lease restored by its holder")
    assert api_server.api.get(path)["spec"]["leaseTransitions"] == next_one.transitions
    assert next_one.lease.may_write()
    next_one.lease.stop(PATIENCE_SECONDS)


def test_a_lease_in_a_namespace_that_does_not_exist_is_told(
    api: ApiServer, lease_settings: LeaseSettings
) -> None:
    nowhere = Candidate(api, replace(lease_settings, namespace="nowhere"), "x")
    nowhere.lease.start()
    assert nowhere.lost.wait(PATIENCE_SECONDS)
    assert "nowhere" in nowhere.why


def test_without_credentials_the_way_out_is_told(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="or set KUBECONFIG"):
        load_credentials(str(tmp_path / "missing"))
