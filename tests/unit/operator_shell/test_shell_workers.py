"""The control client against real sockets: documents, refusals, silence, trickles and floods."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest

from moe_api import names
from moe_api.plan import GroupPlan, Member, encode_layers
from moe_api.worker import DrainRequest, WorkerPhase, WorkerState
from moe_operator.settings import WorkerCallSettings
from moe_operator.workers import PlanAnswer, Unreachable, WorkerClient

SETTINGS = WorkerCallSettings(
    connect_timeout_seconds=0.5, deadline_seconds=1.0, max_parallel=4, max_answer_bytes=100_000
)
Reply = Callable[[BaseHTTPRequestHandler, bytes], None]


class Fleet:
    """Workers at 127.0.0.x on one port, each with its own manners."""

    def __init__(self) -> None:
        self.port = _free_port()
        self.servers: list[ThreadingHTTPServer] = []
        self.asked: list[tuple[str, str, str | None, bytes]] = []

    def start(self, address: str, reply: Reply) -> str:
        fleet = self

        class Handler(BaseHTTPRequestHandler):
            def handle_any(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                fleet.asked.append(
                    (self.command, self.path, self.headers.get("Authorization"), body)
                )
                reply(self, body)

            do_GET = do_PUT = do_POST = handle_any

            def log_message(self, format: str, *args: object) -> None:
                pass

        server = ThreadingHTTPServer((address, self.port), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self.servers.append(server)
        return address


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def says(status: int, content: Any) -> Reply:
    def reply(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        raw = content if isinstance(content, bytes) else json.dumps(content).encode()
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(raw)))
        handler.end_headers()
        handler.wfile.write(raw)

    return reply


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    started = Fleet()
    yield started
    for server in started.servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def client(fleet: Fleet) -> Iterator[WorkerClient]:
    made = WorkerClient(SETTINGS, time.monotonic, control_port=fleet.port)
    yield made
    made.close()


def plan() -> GroupPlan:
    return GroupPlan(
        namespace="n", deployment="d", group=0, leader_epoch=1, generation=1, epoch=1,
        members=[Member(id=0, pod="p", uid="u", address="127.0.0.2", incarnation="i")],
        layers=encode_layers(np.array([[[0, 1]]], dtype=np.int32)),
    ).sealed()  # fmt: skip


def test_states_come_back_by_key_and_a_dead_worker_is_a_value(
    fleet: Fleet, client: WorkerClient
) -> None:
    state = WorkerState(incarnation="i", member=1, phase=WorkerPhase.WAITING)
    up = fleet.start("127.0.0.2", says(200, state.to_wire()))
    answers = client.states({"up": up, "down": "127.0.0.3"}, token="secret")
    assert answers["up"] == state
    assert isinstance(answers["down"], Unreachable)
    assert "ConnectError" in answers["down"].reason
    assert fleet.asked == [("GET", names.CONTROL_STATE, "Bearer secret", b"")]


def test_a_plan_is_accepted_or_refused_with_what_is_in_force(
    fleet: Fleet, client: WorkerClient
) -> None:
    in_force = {"leaderEpoch": 2, "generation": 5, "epoch": 7}
    targets = {
        0: fleet.start("127.0.0.2", says(200, {})),
        1: fleet.start("127.0.0.3", says(409, in_force)),
        2: fleet.start("127.0.0.4", says(401, {"detail": "no"})),
        3: fleet.start("127.0.0.5", says(204, b"")),
    }
    answers = client.put_plans(targets, plan(), token="t")
    assert answers[0] == PlanAnswer(accepted=True, in_force={})
    assert answers[1] == PlanAnswer(accepted=False, in_force=in_force)
    assert answers[2] == Unreachable('answered 401: {"detail": "no"}')
    assert answers[3] == PlanAnswer(accepted=True, in_force={})
    assert GroupPlan.from_json(fleet.asked[0][3]) == plan()


def test_documents_that_cannot_be_read_are_unreachable_with_the_reason(
    fleet: Fleet, client: WorkerClient
) -> None:
    targets = {
        "newer": fleet.start("127.0.0.2", says(200, {"schema": 99})),
        "garbage": fleet.start("127.0.0.3", says(200, b"<html>")),
        "error": fleet.start("127.0.0.4", says(503, {})),
    }
    answers = client.loads(targets, token="t")
    reasons = {key: answer.reason for key, answer in answers.items()}  # type: ignore[union-attr]
    assert "schema 99" in reasons["newer"]
    assert "unreadable" in reasons["garbage"]
    assert reasons["error"].startswith("answered 503")


def test_a_worker_that_trickles_or_floods_is_cut_off(fleet: Fleet, client: WorkerClient) -> None:
    stop = threading.Event()

    def trickle(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        handler.send_response(200)
        handler.end_headers()
        while not stop.wait(0.05):
            try:
                handler.wfile.write(b" ")
            except OSError:
                return

    targets = {
        "trickle": fleet.start("127.0.0.2", trickle),
        "flood": fleet.start("127.0.0.3", says(200, b" " * 200_000)),
        "silent": fleet.start("127.0.0.4", lambda handler, body: stop.wait(30) and None),
    }
    answers = client.states(targets, token="t")
    stop.set()
    reasons = {key: answer.reason for key, answer in answers.items()}  # type: ignore[union-attr]
    assert "no whole answer within 1.0 s" in reasons["trickle"]
    assert "longer than 100000 bytes" in reasons["flood"]
    assert "ReadTimeout" in reasons["silent"]


def test_workers_are_asked_in_parallel(fleet: Fleet, client: WorkerClient) -> None:
    together = threading.Barrier(3)
    state = WorkerState(incarnation="i", member=1, phase=WorkerPhase.SERVING).to_wire()

    def reply(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        together.wait(timeout=5.0)  # passes only when all three were asked
        says(200, state)(handler, body)

    targets = {n: fleet.start(f"127.0.0.{n}", reply) for n in (2, 3, 4)}
    answers = client.states(targets, token="t")
    assert all(isinstance(answer, WorkerState) for answer in answers.values())


def test_a_drain_is_asked_for_with_its_deadline(fleet: Fleet, client: WorkerClient) -> None:
    target = fleet.start("127.0.0.2", says(202, {}))
    assert client.drain({0: target}, DrainRequest(deadline_seconds=7), "t") == {0: True}
    method, path, _, body = fleet.asked[0]
    assert (method, path) == ("POST", names.CONTROL_DRAIN)
    assert json.loads(body)["deadlineSeconds"] == 7


def test_no_targets_is_no_work(client: WorkerClient) -> None:
    assert client.states({}, "t") == {}


def test_a_proxy_of_the_environment_does_not_come_between(
    fleet: Fleet, client: WorkerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    state = WorkerState(incarnation="i", member=1, phase=WorkerPhase.WAITING)
    up = fleet.start("127.0.0.2", says(200, state.to_wire()))
    made = WorkerClient(SETTINGS, time.monotonic, control_port=fleet.port)
    assert made.states({0: up}, "t") == {0: state}
    made.close()
