"""The real ladder over real worker processes and a real API server; only the kubelet is played."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from devcluster.build import CHECKOUT
from devcluster.cluster import Cluster as ApiServerInstance
from moe_api.plan import GroupPlan
from tests.support.real_workers import RealFleet, RealWorker, RealWorld

pytestmark = [pytest.mark.apiserver, pytest.mark.processes, pytest.mark.timeout(900)]
TINY = f"file://{CHECKOUT}/examples/tiny-moe"
SPEC: dict[str, Any] = {
    "model": {"uri": TINY, "servedName": "tiny"},
    "parallelism": {"expert": 3},
    "experts": {"redundantSlotsPerRank": 2},
    "kvCache": {"blocks": 256},
    "scheduler": {"maxRunning": 16},
    "rebalancing": {"intervalSeconds": 2, "windowSeconds": 300, "cooldownSeconds": 5},
}
CLIENTS = 3
PROMPT = "def read_lines(path):\n    with open(path) as"


@pytest.fixture
def world(
    custom_resources: ApiServerInstance, namespace: str, tmp_path: Path
) -> Iterator[RealWorld]:
    with RealFleet(tmp_path) as fleet:
        made = RealWorld(custom_resources, namespace, fleet)
        yield made
        made.close()


def ask(worker: RealWorker, prompt: str = PROMPT, max_tokens: int = 24) -> str:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    answer = worker.http.post("/v1/completions", json=body)
    answer.raise_for_status()
    text: str = answer.json()["choices"][0]["text"]
    return text


@contextmanager
def traffic(workers: list[RealWorker], failed: list[str]) -> Iterator[None]:
    """Clients of each worker that ask without pause, until it drains; what fails is told."""
    ended = threading.Event()

    def client(worker: RealWorker) -> None:
        with httpx.Client(base_url=worker.http.base_url, timeout=60) as http:
            while not ended.is_set():
                body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 32, "temperature": 0}
                try:
                    answer = http.post("/v1/completions", json=body)
                except httpx.TransportError as error:
                    failed.append(f"{worker.member}: {error!r}")
                    return
                if answer.status_code == 503 and "drain" in answer.text:
                    return
                if answer.status_code == 503 and "retry-after" in answer.headers:
                    ended.wait(0.5)  # "not now" between two generations: a client asks again
                elif answer.status_code != 200:
                    failed.append(f"{worker.member}: {answer.status_code} {answer.text}")

    threads = [threading.Thread(target=client, args=(w,)) for w in workers * CLIENTS]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join(90)


def test_answers_stay_while_experts_move_and_a_rank_dies(world: RealWorld):
    world.create(**SPEC)
    world.converge(world.is_ready, deadline_seconds=240)
    workers = [world.worker(member) for member in range(3)]
    expected = ask(workers[0])
    assert [ask(worker) for worker in workers] == [expected] * 3

    failed: list[str] = []
    with traffic(workers, failed):
        world.converge(
            lambda: any(
                d.verdict == "Applied" and d.measured_gain is not None
                for d in world.status().decisions
            ),
            deadline_seconds=300,
        )
    assert failed == []
    assert [ask(worker) for worker in workers] == [expected] * 3
    [applied] = [d for d in world.status().decisions if d.verdict == "Applied"][-1:]
    assert applied.bytes
    assert applied.measured_stall_millis is not None

    survivors = [workers[0], workers[2]]
    with traffic(survivors, failed):
        world.delete_pod(1)
        world.converge(world.is_ready, deadline_seconds=240)
    assert failed == [], "only requests of the lost rank may fail"
    assert [ask(world.worker(member)) for member in range(3)] == [expected] * 3


def test_a_pod_that_is_deleted_gracefully_fails_no_request_at_all(world: RealWorld):
    world.nodes = {1: world.make_node()}
    world.create(**SPEC)
    world.converge(world.is_ready, deadline_seconds=240)
    workers = [world.worker(member) for member in range(3)]
    failed: list[str] = []
    with traffic(workers, failed):
        world.delete_pod(1, grace_seconds=70)
        world.converge(lambda: workers[1].incarnation not in world.uids(), deadline_seconds=120)
        world.converge(world.is_ready, deadline_seconds=240)
    assert failed == []
    assert workers[1].process.returncode == 0
    assert [line for w in (workers[0], workers[2]) for line in disruptions(w)] == []


def test_experts_leave_a_cordoned_node_and_then_its_pod_under_traffic(world: RealWorld):
    node = world.make_node()
    world.nodes = {1: node}
    world.create(**SPEC | {"rebalancing": SPEC["rebalancing"] | {"mode": "Off"}})
    world.converge(world.is_ready, deadline_seconds=240)
    workers = [world.worker(member) for member in range(3)]
    expected = ask(workers[0])
    failed: list[str] = []

    def plan() -> GroupPlan:
        return GroupPlan.model_validate((world.placement() or {})["spec"])

    def applied() -> bool:
        return bool((world.placement() or {})["status"].get("appliedEpoch") == plan().epoch)

    with traffic(workers, failed):
        world.api.patch(f"/api/v1/nodes/{node}", {"spec": {"unschedulable": True}})
        world.converge(
            lambda: (plan().slots()[:, 1] == -1).all() and applied(), deadline_seconds=240
        )
        assert world.budget() == 2, "now its pod may be evicted"
        assert [ask(worker) for worker in workers] == [expected] * 3, "the empty rank serves on"
        world.delete_pod(1, grace_seconds=70)
        world.converge(lambda: workers[1].incarnation not in world.uids(), deadline_seconds=120)
    assert failed == []
    assert [line for w in (workers[0], workers[2]) for line in disruptions(w)] == []
    [evacuated] = [d for d in world.status().decisions if d.reason == "Evacuation"]
    assert evacuated.bytes


def disruptions(worker: RealWorker) -> list[str]:
    return [line for line in worker.log.read_text().splitlines() if "is disrupted" in line]
