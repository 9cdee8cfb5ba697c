"""The control API over real sockets: who may speak, what documents do, what peers can pull."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from moe_api import names
from moe_api.load import LoadReport
from moe_api.plan import GroupPlan, Member, encode_layers
from moe_api.worker import DrainRequest, WorkerState
from moe_worker.control import CHUNK_BYTES, MAX_CONTROL_BODY_BYTES, BearerToken
from tests.support.fake_engine import FakeEngine
from tests.support.http_worker import TOKEN, HttpWorker, http_worker

ROUTES = [
    ("PUT", names.CONTROL_PLAN),
    ("GET", names.CONTROL_PLAN),
    ("GET", names.CONTROL_STATE),
    ("GET", names.CONTROL_LOAD),
    ("POST", names.CONTROL_DRAIN),
    ("GET", f"{names.CONTROL_EXPERT}/0/0?expert=0&generation=1&epoch=1"),
    ("GET", "/nothing"),
]


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(lambda prompt: iter(b"abc"))


@pytest.fixture
def worker(engine: FakeEngine) -> Iterator[HttpWorker]:
    with http_worker(engine) as running:
        yield running


@pytest.fixture
def control(worker: HttpWorker) -> Iterator[httpx.Client]:
    with worker.control() as client:
        yield client


def plan(generation: int = 1, epoch: int = 1) -> GroupPlan:
    member = Member(id=0, pod="p", uid="u", address="127.0.0.1", incarnation="u")
    slots = np.array([[[0, 1, -1]], [[1, 0, -1]]], dtype=np.int32)
    return GroupPlan(
        namespace="default",
        deployment="d",
        group=0,
        leader_epoch=1,
        generation=generation,
        epoch=epoch,
        members=[member],
        layers=encode_layers(slots),
    ).sealed()


def test_without_the_token_nothing_answers(worker: HttpWorker) -> None:
    wrong = [
        None,
        "",
        TOKEN,
        f"bearer {TOKEN}",
        f"Bearer {TOKEN}x",
        f"Bearer {TOKEN[:-1]}",
        "Basic x",
    ]
    with httpx.Client(base_url=worker.control_url) as client:
        for method, path in ROUTES:
            for header in wrong:
                headers = {} if header is None else {"Authorization": header}
                response = client.request(method, path, headers=headers)
                assert response.status_code == 401, (method, path, header)
                assert response.headers["www-authenticate"] == "Bearer"


def test_the_token_twice_is_not_the_token(worker: HttpWorker) -> None:
    headers = [("Authorization", f"Bearer {TOKEN}"), ("Authorization", "Bearer other")]
    url = worker.control_url + names.CONTROL_STATE
    assert httpx.get(url, headers=headers).status_code == 401


def test_an_empty_token_is_refused() -> None:
    with pytest.raises(ValueError, match="token is empty"):
        BearerToken(lambda *_: None, "")  # type: ignore[arg-type, return-value]


def test_a_plan_is_taken_known_refused_and_shown(control: httpx.Client) -> None:
    assert control.get(names.CONTROL_PLAN).status_code == 404
    newest = plan(generation=2, epoch=5)
    for _ in range(2):
        response = control.put(names.CONTROL_PLAN, content=newest.to_json())
        assert response.status_code == 202
    assert GroupPlan.from_json(control.get(names.CONTROL_PLAN).content) == newest
    response = control.put(names.CONTROL_PLAN, content=plan(generation=2, epoch=4).to_json())
    assert response.status_code == 409
    assert response.json() == {"leaderEpoch": 1, "generation": 2, "epoch": 5}


BAD_PLANS: list[tuple[dict[str, Any], str]] = [
    ({"schema": 2}, "reads up to 1"),
    ({"epoch": 0}, "GroupPlan: epoch"),
    ({"surprise": 1}, "surprise"),
    ({"members": []}, "GroupPlan: members"),
    ({"layers": [{"layer": 0, "slots": "a,b"}]}, "not integers"),
    ({"layers": [{"layer": 0, "slots": "0;1"}]}, "expected 1 ranks"),
]


def test_a_bad_plan_is_400_with_its_sentence(control: httpx.Client, engine: FakeEngine) -> None:
    for change, sentence in BAD_PLANS:
        response = control.put(names.CONTROL_PLAN, json={**plan().to_wire(), **change})
        assert response.status_code == 400, change
        assert sentence in response.json()["error"]["message"]
    assert engine.plan is None


def test_what_is_no_document_is_400(control: httpx.Client) -> None:
    for body in (b"", b"{", b"[]", b"\xff", b"null"):
        assert control.put(names.CONTROL_PLAN, content=body).status_code == 400, body
        assert control.post(names.CONTROL_DRAIN, content=body).status_code == 400, body


def test_bodies_are_bounded(control: httpx.Client) -> None:
    body = b" " * (MAX_CONTROL_BODY_BYTES + 1)
    assert control.put(names.CONTROL_PLAN, content=body).status_code == 413


def test_state_and_load_are_the_documents(control: httpx.Client, engine: FakeEngine) -> None:
    state = WorkerState.from_json(control.get(names.CONTROL_STATE).content)
    assert state == engine.state()
    load = LoadReport.from_json(control.get(names.CONTROL_LOAD).content)
    assert load.served == engine.load().served


def test_a_drain_stops_admission_at_once(
    control: httpx.Client, engine: FakeEngine, worker: HttpWorker
) -> None:
    body = DrainRequest(deadline_seconds=30).to_json()
    response = control.post(names.CONTROL_DRAIN, content=body)
    assert response.status_code == 202
    assert WorkerState.from_json(response.content).phase == "Draining"
    assert engine.drains == [30]
    with worker.client() as client:
        assert client.get("/readyz").json() == {"ready": False, "reason": "Draining"}
        refused = client.post("/v1/completions", json={"model": "byte-moe", "prompt": "a"})
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        assert refused.headers["connection"] == "close"


def test_past_its_deadline_a_drain_ends_streams_with_an_error_chunk(
    control: httpx.Client, engine: FakeEngine, worker: HttpWorker
) -> None:
    engine.hold()
    body = {"model": "byte-moe", "prompt": "a", "stream": True}
    with worker.client() as client:
        with client.stream("POST", "/v1/completions", json=body) as stream:
            drain = DrainRequest(deadline_seconds=0).to_json()
            control.post(names.CONTROL_DRAIN, content=drain)
            *_, last = [line for line in stream.iter_lines() if line]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "drain_deadline"


def test_peers_pull_the_bytes_of_a_slot(control: httpx.Client, engine: FakeEngine) -> None:
    weights = np.random.default_rng(0).bytes(2 * CHUNK_BYTES + 17)
    engine.slots[1, 2, 7] = weights
    engine.put_plan(plan(generation=3, epoch=4))
    path = f"{names.CONTROL_EXPERT}/1/2"
    asked = {"expert": 7, "generation": 3, "epoch": 4}
    response = control.get(path, params=asked)
    assert response.status_code == 200
    assert response.content == weights
    assert response.headers["content-length"] == str(len(weights))
    assert response.headers["x-moe-checksum"] == hashlib.sha256(weights).hexdigest()
    for wrong in ({"expert": 6}, {"generation": 2}, {"epoch": 5}):
        assert control.get(path, params={**asked, **wrong}).status_code == 409


def test_a_bad_pull_is_refused(control: httpx.Client) -> None:
    for path, params, status in (
        ("/1/2", {}, 400),
        ("/1/2", {"expert": "x", "generation": 1, "epoch": 1}, 400),
        ("/1/2", {"expert": "-1", "generation": 1, "epoch": 1}, 400),
        ("/1/2", {"expert": "9" * 30, "generation": 1, "epoch": 1}, 400),
        ("/1/x", {}, 404),
        ("/1", {}, 404),
        ("/1/2/3", {}, 404),
    ):
        response = control.get(names.CONTROL_EXPERT + path, params=params)
        assert response.status_code == status, (path, params)


def test_the_control_listener_has_no_public_routes(control: httpx.Client) -> None:
    for path in ("/v1/models", "/metrics", "/healthz", "/docs", "/openapi.json"):
        assert control.get(path).status_code == 404
