"""The worker's metrics: few series however big the model; no expert gets another's tokens."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from moe_api.load import LoadReport
from moe_api.worker import ModelShape, WorkerPhase, WorkerState
from moe_worker.expert_tokens import ExpertTokens
from moe_worker.metrics import (
    MAX_EXPERT_SERIES,
    EngineCollector,
    WorkerMetrics,
    held_experts,
    state_families,
)
from tests.support.fake_engine import FakeEngine

NUM_LAYERS, NUM_SLOTS = 58, 10


class BigEngine(FakeEngine):
    """58 layers of 256 experts over 32 ranks: 10 slots a layer here."""

    def state(self) -> WorkerState:
        layer = ",".join(str(slot * 25) for slot in range(NUM_SLOTS))
        return WorkerState(
            incarnation="i",
            member=0,
            phase=WorkerPhase.SERVING,
            model=ModelShape(
                layers=NUM_LAYERS, experts=256, top_k=8, bytes_per_expert=1, kv_bytes_per_token=9
            ),
            generation=1,
            applied_epoch=1,
            slots="|".join([layer] * NUM_LAYERS),
        )

    def load(self) -> LoadReport:
        return LoadReport(
            incarnation="i",
            member=0,
            generation=1,
            epoch=1,
            monotonic_seconds=0.0,
            routed=[[1] * 256] * NUM_LAYERS,
            served=[[layer + slot for slot in range(NUM_SLOTS)] for layer in range(NUM_LAYERS)],
        )


def full_metrics() -> tuple[WorkerMetrics, str]:
    """Every label that can occur has occurred."""
    metrics = WorkerMetrics(CollectorRegistry())
    metrics.registry.register(EngineCollector(BigEngine(lambda prompt: [])))
    for phase in ("schedule", "agree", "run", "publish"):
        metrics.step(phase, 0.01)
    for exchange in ("agree", "dispatch", "combine"):
        metrics.exchange(exchange, 0.01)
    for scope in ("self", "domain", "remote"):
        metrics.sent(scope, 100)
    metrics.switched(2, 0.02)
    metrics.kernels("reference")
    metrics.loaded(2000, 5000)
    return metrics, generate_latest(metrics.registry).decode()


def test_a_worker_of_a_big_model_has_at_most_1000_series() -> None:
    _, text = full_metrics()
    series = [line for line in text.splitlines() if line and not line.startswith("#")]
    experts = [line for line in series if line.startswith("moe_expert_tokens_total{")]
    assert len(experts) == MAX_EXPERT_SERIES
    assert len(series) <= 1000


def test_the_busiest_experts_are_shown() -> None:
    metrics, _ = full_metrics()
    registry = metrics.registry
    labels = {"layer": "57", "expert": str(9 * 25)}
    assert registry.get_sample_value("moe_expert_tokens_total", labels) == 57 + 9
    assert (
        registry.get_sample_value("moe_expert_tokens_total", {"layer": "0", "expert": "0"}) is None
    )
    assert registry.get_sample_value("moe_kv_bytes_per_token") == 9
    assert registry.get_sample_value("moe_checkpoint_read_bytes") == 2000
    assert registry.get_sample_value("moe_load_peak_resident_bytes") == 5000


def test_blocks_by_state_and_what_the_prefix_cache_held_are_shown() -> None:
    state = WorkerState(
        incarnation="i",
        member=0,
        phase=WorkerPhase.SERVING,
        kv_blocks_used=3,
        kv_blocks_cached=5,
        kv_blocks_total=20,
    )
    blocks = next(family for family in state_families(state) if family.name == "moe_kv_blocks")
    shown = {sample.labels["state"]: sample.value for sample in blocks.samples}
    assert shown == {"used": 3, "cached": 5, "free": 12}
    metrics = WorkerMetrics(CollectorRegistry())
    metrics.prompt_computed(40, 32)
    metrics.prompt_computed(10, 0)
    get = metrics.registry.get_sample_value
    assert get("moe_prefix_cache_query_tokens_total") == 50
    assert get("moe_prefix_cache_hit_tokens_total") == 32


def test_timers_tell_the_first_token_from_the_next() -> None:
    metrics = WorkerMetrics(CollectorRegistry())
    timer = metrics.timer(100.0)
    for seconds in (100.5, 100.6, 100.8):
        timer.token(seconds)
    get = metrics.registry.get_sample_value
    assert get("moe_time_to_first_token_seconds_sum") == pytest.approx(0.5)
    assert get("moe_inter_token_latency_seconds_count") == 2
    assert get("moe_inter_token_latency_seconds_sum") == pytest.approx(0.3)


def test_an_expert_that_moves_into_a_slot_does_not_inherit_its_tokens() -> None:
    tokens = ExpertTokens()
    tokens.read([[10, 4]], [[0, 1]])
    tokens.read([[15, 9]], [[0, 2]])  # slot 1 changed hands: its 5 new tokens are nobody's
    tokens.read([[15, 12]], [[0, 2]])
    assert tokens.busiest(9) == [((0, 0), 15), ((0, 2), 3)]
    tokens.read([[20, 12]], [[1, -1]])  # expert 1 is back, with what it had before
    assert tokens.busiest(9) == [((0, 1), 4)]


def test_copies_of_an_expert_on_one_rank_are_added() -> None:
    tokens = ExpertTokens()
    tokens.read([[10, 4]], [[3, 3]])
    assert tokens.busiest(9) == [((0, 3), 14)]


def test_slots_of_a_state_are_read() -> None:
    state = WorkerState(incarnation="i", member=0, phase=WorkerPhase.WAITING)
    assert held_experts(state) == []
    assert held_experts(state.model_copy(update={"slots": "0,-1|2,3"})) == [[0, -1], [2, 3]]
