"""Both loops against servers of known speed, in virtual time."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Iterable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_worker.bench.arrivals import ClosedLoop, OpenLoop, Traffic, arrivals
from moe_worker.bench.drive import Clock, drive
from moe_worker.bench.measurement import Measurement
from moe_worker.bench.objective import Objective
from moe_worker.bench.prompts import Prompt
from moe_worker.bench.record import Record
from tests.support.bench_records import record
from tests.support.virtual_time import run_virtual

FOREVER = 1e9


class Server:
    """Answers each request so many seconds after it was sent."""

    def __init__(self, service_seconds: Callable[[int], float]) -> None:
        self.records: list[Record] = []
        self.most_at_once = 0
        self._service_seconds = service_seconds
        self._num_sent = 0
        self._under_way = 0

    async def send(self, prompt: Prompt, due: float) -> Record:
        now = asyncio.get_running_loop().time
        sent = now()
        self._under_way += 1
        self.most_at_once = max(self.most_at_once, self._under_way)
        self._num_sent += 1
        await asyncio.sleep(self._service_seconds(self._num_sent - 1))
        self._under_way -= 1
        done = record(due=due, sent=sent, texts=(now(),), end=now())
        self.records.append(done)
        return done


def driven(
    server: Server, offsets: Iterable[float | None], at_once: int, stop_starting: float = FOREVER
) -> Measurement:
    async def run() -> Measurement:
        now = asyncio.get_running_loop().time
        measurement = Measurement(now(), Objective(), seed=0)
        clock = Clock(now, asyncio.sleep)
        await drive(
            iter(offsets), endless(), server.send, measurement, at_once, stop_starting, clock
        )
        return measurement

    return run_virtual(run())


def endless() -> Iterator[Prompt]:
    return itertools.repeat(Prompt("x", 1))


def test_a_server_that_stalls_can_not_hide_it() -> None:
    """One connection, a request a second, and a first answer after 10 s: the others waited."""
    server = Server(lambda index: 10.0 if index == 0 else 0.0)
    measurement = driven(server, [float(second) for second in range(1, 11)], at_once=1)
    waits = [done.whole_seconds for done in server.records]
    assert waits == pytest.approx([10, 9, 8, 7, 6, 5, 4, 3, 2, 1])
    found = measurement.latencies["ttft"].distribution()
    assert found is not None
    assert found.mean == pytest.approx(5.5)


@given(
    st.floats(0.1, 50.0),
    st.integers(1, 40),
    st.integers(1, 8),
    st.floats(0.0, 5.0),
    st.integers(0, 2**32),
)
def test_an_open_loop_sends_when_due_unless_all_connections_are_busy(
    rate: float, num_requests: int, connections: int, service: float, seed: int
) -> None:
    traffic = OpenLoop(rate, connections)
    offsets = list(arrivals(traffic, num_requests, FOREVER, random.Random(seed)))
    server = Server(lambda index: service)
    measurement = driven(server, offsets, connections)
    assert measurement.num_ended == num_requests
    assert server.most_at_once <= connections
    assert sorted(done.due_seconds for done in server.records) == pytest.approx(offsets)
    for done in server.records:
        assert done.sent_seconds is not None
        assert done.sent_seconds >= done.due_seconds - 1e-9
        if server.most_at_once < connections:
            assert done.sent_seconds == pytest.approx(done.due_seconds)


@given(st.integers(0, 40), st.integers(1, 8), st.integers(0, 2**32))
def test_users_of_a_closed_loop_are_busy_all_the_time(
    num_requests: int, users: int, seed: int
) -> None:
    source = random.Random(seed)
    services = [source.uniform(0.1, 2.0) for _ in range(num_requests)]
    traffic: Traffic = ClosedLoop(users)
    server = Server(lambda index: services[index])
    measurement = driven(server, arrivals(traffic, num_requests, FOREVER, source), users)
    assert measurement.num_ended == measurement.num_started == num_requests
    assert server.most_at_once == min(users, num_requests)
    assert all(done.waited_seconds == 0.0 for done in server.records)
    # Nobody idles while there is something to send (the bound of greedy scheduling).
    most = sum(services) / users + max(services, default=0.0)
    assert measurement.ended_seconds <= most + 1e-6


def test_nothing_starts_after_the_duration_and_what_runs_is_waited_for() -> None:
    server = Server(lambda index: 3.0)
    measurement = driven(server, itertools.repeat(None), at_once=2, stop_starting=10.0)
    starts = sorted(done.due_seconds for done in server.records)
    assert starts == pytest.approx([0, 0, 3, 3, 6, 6, 9, 9])
    assert measurement.ended_seconds == pytest.approx(12.0)


def test_cancelling_leaves_what_was_measured() -> None:
    server = Server(lambda index: 1.0)

    async def run() -> Measurement:
        loop = asyncio.get_running_loop()
        measurement = Measurement(loop.time(), Objective(), seed=0)
        clock = Clock(loop.time, asyncio.sleep)
        driving = asyncio.create_task(
            drive(itertools.repeat(None), endless(), server.send, measurement, 3, FOREVER, clock)
        )
        await asyncio.sleep(2.5)
        driving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await driving
        return measurement

    measurement = run_virtual(run())
    assert (measurement.num_started, measurement.num_ended) == (9, 6)
