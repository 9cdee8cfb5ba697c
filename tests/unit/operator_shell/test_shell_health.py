"""Liveness and readiness follow what crossed the wire, not what a task believes."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Sequence

import pytest

from moe_operator.metrics import OperatorMetrics
from moe_operator.probes import Probes
from moe_operator.watches import Watch, Watches, expected_watches

PODS, NODES = "/api/v1/pods", "/api/v1/nodes"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watches(clock: Clock) -> Watches:
    return Watches(expected_watches(("Pod", "Node"), ()), clock)


def test_a_kind_is_ready_when_its_watch_was_opened_not_when_it_was_listed(
    watches: Watches,
) -> None:
    assert watches.unopened() == ["Node", "Pod"]
    assert watches.answered(PODS, 200, watching=False) == "Pod"
    assert watches.unopened() == ["Node", "Pod"]
    assert watches.answered(PODS, 200, watching=True) is None
    assert watches.unopened() == ["Node"]


def test_f04_a_watch_that_cannot_be_opened_grows_old(watches: Watches, clock: Clock) -> None:
    for path in (PODS, NODES):
        watches.answered(path, 200, watching=True)
    clock.now = 200.0
    watches.answered(PODS, 200, watching=True)
    watches.answered(NODES, 503, watching=True)
    watches.answered(NODES, 200, watching=False)
    clock.now = 301.0
    assert watches.ages() == {"Pod": 101.0, "Node": 301.0}


def test_with_namespaces_the_most_neglected_watch_of_a_kind_counts(clock: Clock) -> None:
    expected = expected_watches(("Pod", "Node"), ("a", "b"))
    assert expected == [Watch("Pod", "a"), Watch("Pod", "b"), Watch("Node", None)]
    watches = Watches(expected, clock)
    clock.now = 50.0
    watches.answered("/api/v1/namespaces/a/pods", 200, watching=True)
    assert watches.ages()["Pod"] == 50.0
    assert "Pod" in watches.unopened()


def test_other_requests_are_not_watches(watches: Watches) -> None:
    assert watches.answered("/api/v1/secrets", 200, watching=True) is None
    assert watches.answered(PODS, 500, watching=False) is None


def test_probes_answer_in_words_and_metrics_hold_the_age_of_every_watch(
    watches: Watches, clock: Clock
) -> None:
    problems: list[str] = []
    metrics = OperatorMetrics()
    metrics.watch_ages(watches.ages)
    metrics.reconcile_errors.labels(reason="Conflict").inc()
    probes = Probes(
        0, liveness=lambda: problems, readiness=watches.unopened, metrics=metrics.render
    )
    probes.start()
    clock.now = 7.0
    try:
        assert _get(probes, "/healthz") == (200, "ok\n")
        problems.append("no watch of Pod could be opened for 301 s")
        assert _get(probes, "/healthz") == (503, "no watch of Pod could be opened for 301 s\n")
        assert _get(probes, "/readyz?verbose") == (503, "Node\nPod\n")
        assert _get(probes, "/other")[0] == 404
        text = _get(probes, "/metrics")[1].splitlines()
        assert 'moe_watch_age_seconds{kind="Pod"} 7.0' in text
        assert 'moe_operator_reconcile_errors_total{reason="Conflict"} 1.0' in text
    finally:
        probes.stop()


def _get(probes: Probes, path: str) -> tuple[int, str]:
    url = f"http://127.0.0.1:{probes.port}{path}"
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_a_problem_list_may_be_any_sequence() -> None:
    nothing: Sequence[str] = ()
    probes = Probes(0, liveness=lambda: nothing, readiness=lambda: nothing, metrics=lambda: b"")
    probes.start()
    try:
        assert _get(probes, "/readyz") == (200, "ok\n")
    finally:
        probes.stop()
