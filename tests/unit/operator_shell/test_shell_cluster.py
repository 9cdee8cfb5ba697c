"""The door to the API over a transport made by hand: fences, errors, pages and paths."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from moe_operator.api_server import Answer, ApiServer
from moe_operator.cluster import Cluster
from moe_operator.errors import (
    AlreadyExists,
    Conflict,
    Missing,
    NotLeader,
    Refused,
    Unavailable,
    from_answer,
)
from moe_operator.resources import RESOURCES
from moe_operator.settings import ClientSettings
from moe_operator.throttle import TokenBucket


@dataclass
class Wire:
    """Answers in order; remembers what was asked."""

    answers: list[tuple[int, Any]]
    asked: list[tuple[str, str, dict[str, str], Any, str]] = field(default_factory=list)

    def __call__(
        self, method: str, path: str, query: Mapping[str, str], body: Any,
        content_type: str, timeout_seconds: tuple[float, float],
    ) -> Answer:  # fmt: skip
        self.asked.append((method, path, dict(query), body, content_type))
        status, content = self.answers.pop(0)
        return Answer(status, {}, json.dumps(content).encode())


def cluster(wire: Wire, leads: bool = True, namespaces: tuple[str, ...] = ()) -> Cluster:
    api = ApiServer(wire, ClientSettings(list_page=2), lambda: 0.0, sleep=lambda _: None)
    return Cluster(api, lambda: leads, namespaces)


def test_a_process_without_the_lease_writes_nothing() -> None:
    wire = Wire([])
    door = cluster(wire, leads=False)
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"namespace": "n", "name": "p"}}
    writes = (
        lambda: door.apply(pod),
        lambda: door.create_pod(pod),
        lambda: door.delete_pod("n", "p", "uid", None),
        lambda: door.apply_status("MoEDeployment", "n", "d", {}),
    )
    for write in writes:
        with pytest.raises(NotLeader):
            write()
    assert wire.asked == []


def test_apply_is_server_side_forced_and_under_our_name() -> None:
    wire = Wire([(200, {})])
    cluster(wire).apply(
        {"apiVersion": "v1", "kind": "Service", "metadata": {"namespace": "n", "name": "s"}}
    )
    method, path, query, _, content_type = wire.asked[0]
    assert (method, path) == ("PATCH", "/api/v1/namespaces/n/services/s")
    assert query == {"fieldManager": "moe-operator", "force": "true"}
    assert content_type == "application/apply-patch+yaml"


def test_a_status_goes_to_its_subresource_with_the_version_it_was_computed_from() -> None:
    wire = Wire([(200, {})])
    cluster(wire).apply_status("MoEDeployment", "n", "d", {"ready": "1/1"}, "42")
    _, path, _, body, _ = wire.asked[0]
    assert path == "/apis/moe-operator.dev/v1alpha1/namespaces/n/moedeployments/d/status"
    assert body["metadata"] == {"namespace": "n", "name": "d", "resourceVersion": "42"}
    assert body["status"] == {"ready": "1/1"}


def test_f08_a_status_for_an_object_that_is_gone_is_no_fault() -> None:
    assert cluster(Wire([(404, {})])).apply_status("MoEDeployment", "n", "d", {}) is None


def test_a_pod_is_deleted_by_uid_only() -> None:
    wire = Wire([(200, {}), (409, {"reason": "Conflict"}), (404, {})])
    door = cluster(wire)
    assert door.delete_pod("n", "p", "u1", 0) is True
    assert wire.asked[0][3]["preconditions"] == {"uid": "u1"}
    assert wire.asked[0][3]["gracePeriodSeconds"] == 0
    assert door.delete_pod("n", "p", "u1", None) is False  # another pod has the name now
    assert "gracePeriodSeconds" not in wire.asked[1][3]
    assert door.delete_pod("n", "p", "u1", None) is False  # gone


def test_lists_follow_their_pages_and_fill_in_the_kind() -> None:
    def page(names: list[str], following: str) -> tuple[int, Any]:
        return 200, {
            "apiVersion": "v1", "kind": "PodList", "metadata": {"continue": following},
            "items": [{"metadata": {"name": name}} for name in names],
        }  # fmt: skip

    wire = Wire([page(["a", "b"], "token"), page(["c"], "")])
    pods = cluster(wire).list_pods("n", "d")
    assert [pod["metadata"]["name"] for pod in pods] == ["a", "b", "c"]
    assert {pod["kind"] for pod in pods} == {"Pod"}
    assert wire.asked[0][2] == {"limit": "2", "labelSelector": "moe-operator.dev/deployment=d"}
    assert wire.asked[1][2]["continue"] == "token"


def test_the_stored_leader_epoch_is_the_largest_in_every_served_namespace() -> None:
    def page(*epochs: int) -> tuple[int, Any]:
        items = [{"metadata": {}, "spec": {"leaderEpoch": epoch}} for epoch in epochs]
        return 200, {"apiVersion": "x/v1", "kind": "ExpertPlacementList", "items": items}

    wire = Wire([page(3, 9), page(4)])
    assert cluster(wire, namespaces=("a", "b")).stored_leader_epoch() == 9
    assert [asked[1].split("/")[5] for asked in wire.asked] == ["a", "b"]
    assert cluster(Wire([page()])).stored_leader_epoch() == 0


@pytest.mark.parametrize(
    ("status", "reason", "kind"),
    [
        (404, "NotFound", Missing),
        (409, "Conflict", Conflict),
        (409, "AlreadyExists", AlreadyExists),
        (401, "Unauthorized", Unavailable),
        (410, "Expired", Unavailable),
        (429, "TooManyRequests", Unavailable),
        (500, "InternalError", Unavailable),
        (503, "", Unavailable),
        (403, "Forbidden", Refused),
        (422, "Invalid", Refused),
    ],
)
def test_answers_become_errors_by_kind(status: int, reason: str, kind: type[Exception]) -> None:
    content = json.dumps({"reason": reason, "message": "says why"}).encode()
    error = from_answer("GET /x", status, {"Retry-After": "7"}, content)
    assert type(error) is kind
    assert "GET /x" in str(error)
    assert "says why" in str(error)
    if isinstance(error, Unavailable):
        assert error.retry_after_seconds == 7.0
    if isinstance(error, Refused):
        assert (error.status, error.reason) == (status, reason)


def test_an_answer_that_is_not_json_is_told_as_it_is() -> None:
    assert "gateway" in str(from_answer("GET /x", 502, {}, b"bad gateway"))


def test_cluster_scoped_kinds_have_no_namespace_in_their_path() -> None:
    assert RESOURCES["Node"].path("ignored", "n1") == "/api/v1/nodes/n1"
    assert RESOURCES["Pod"].path("n", "p", "log") == "/api/v1/namespaces/n/pods/p/log"
    assert RESOURCES["Pod"].path() == "/api/v1/pods"


def test_the_rate_limit_lets_a_burst_through_and_then_spaces_requests() -> None:
    now = 0.0
    bucket = TokenBucket(per_second=10.0, burst=2, monotonic=lambda: now)
    assert [round(bucket.reserve(), 3) for _ in range(4)] == [0.0, 0.0, 0.1, 0.2]
    now = 0.2  # the credit is paid back, no more
    assert not bucket.try_take()
    now = 0.31
    assert bucket.try_take()
    now = 100.0
    assert [bucket.try_take() for _ in range(3)] == [True, True, False]
