"""Fills the worker's metrics: what the engine reports, requests experience, a scrape asks.

The declarations are in `moe_api.metrics`. Three sources: `WorkerMetrics` is the engine's observer,
`RequestTimer` is held by one request, and `EngineCollector` reads state and load when scraped, so
that nothing is counted twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Literal

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from moe_api import metrics as declared
from moe_api.load import LoadReport
from moe_api.worker import WorkerState
from moe_worker.engine.events import FinishReason
from moe_worker.engine.observer import ExchangePhase, Scope, StepPhase
from moe_worker.expert_tokens import ExpertTokens
from moe_worker.serving_engine import ServingEngine

MAX_EXPERT_SERIES = 256
"""Busiest (layer, expert) pairs shown; the full matrix is the LoadReport's."""

Outcome = Literal["stop", "length", "cancelled", "error", "rejected", "invalid"]
OUTCOMES: tuple[Outcome, ...] = ("stop", "length", "cancelled", "error", "rejected", "invalid")
"""`rejected` = no room or not admitting, `invalid` = the client's mistake."""


class WorkerMetrics:
    """The engine's `Observer`, and the counters of requests; any thread may call it."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self._requests = declared.register(declared.REQUESTS, registry)
        for outcome in OUTCOMES:
            self._requests.labels(outcome)
        self._first_token = declared.register(declared.TIME_TO_FIRST_TOKEN, registry)
        self._between_tokens = declared.register(declared.INTER_TOKEN_LATENCY, registry)
        self._prompt_tokens = declared.register(declared.PROMPT_TOKENS, registry)
        self._prefix_queries = declared.register(declared.PREFIX_CACHE_QUERY_TOKENS, registry)
        self._prefix_hits = declared.register(declared.PREFIX_CACHE_HIT_TOKENS, registry)
        self._generated_tokens = declared.register(declared.GENERATED_TOKENS, registry)
        # Found once: these are asked for several times a step.
        self._step_of = cache(declared.register(declared.STEP_SECONDS, registry).labels)
        self._exchange_of = cache(declared.register(declared.EXCHANGE_SECONDS, registry).labels)
        self._sent_to = cache(declared.register(declared.EXCHANGE_BYTES, registry).labels)
        self._migrated = declared.register(declared.MIGRATION_BYTES, registry)
        self._stall = declared.register(declared.SWAP_STALL, registry)
        self._kernels = declared.register(declared.KERNELS_INFO, registry)
        self._warm_up = declared.register(declared.WARM_UP_SECONDS, registry)
        self._checkpoint_read = declared.register(declared.CHECKPOINT_READ_BYTES, registry)
        self._load_peak = declared.register(declared.LOAD_PEAK_BYTES, registry)

    def loaded(self, read_bytes: int, peak_bytes: int) -> None:
        self._checkpoint_read.set(read_bytes)
        self._load_peak.set(peak_bytes)

    def warmed_up(self, seconds: float) -> None:
        self._warm_up.set(seconds)

    def step(self, phase: StepPhase, seconds: float) -> None:
        self._step_of(phase).observe(seconds)

    def exchange(self, phase: ExchangePhase, seconds: float) -> None:
        self._exchange_of(phase).observe(seconds)

    def sent(self, scope: Scope, num_bytes: int) -> None:
        self._sent_to(scope).inc(num_bytes)

    def migrated(self, num_bytes: int) -> None:
        self._migrated.inc(num_bytes)

    def switched(self, epoch: int, stall_seconds: float | None) -> None:
        """The epoch itself is read from the state when scraped."""
        if stall_seconds is not None:
            self._stall.observe(stall_seconds)

    def admitted(self, prompt_tokens: int) -> None:
        self._prompt_tokens.inc(prompt_tokens)

    def prompt_computed(self, num_tokens: int, num_cached_tokens: int) -> None:
        self._prefix_queries.inc(num_tokens)
        self._prefix_hits.inc(num_cached_tokens)

    def generated(self, num_tokens: int) -> None:
        self._generated_tokens.inc(num_tokens)

    def finished(self, reason: FinishReason) -> None:
        """Not counted: a text cut at a stop string looks cancelled from here. `answered` counts."""

    def answered(self, outcome: Outcome) -> None:
        """One generation request is over."""
        self._requests.labels(outcome).inc()

    def kernels(self, implementation: str) -> None:
        self._kernels.labels(implementation).set(1)

    def timer(self, start_seconds: float) -> RequestTimer:
        """For a request that arrived at `start_seconds` (monotonic)."""
        return RequestTimer(self, start_seconds)

    def token_after(self, seconds: float, first: bool) -> None:
        (self._first_token if first else self._between_tokens).observe(seconds)


class RequestTimer:
    """Latencies of one request's tokens."""

    def __init__(self, metrics: WorkerMetrics, start_seconds: float) -> None:
        self._metrics = metrics
        self._last_seconds = start_seconds
        self._first = True

    def token(self, seconds: float) -> None:
        """A token was made at `seconds` (monotonic)."""
        self._metrics.token_after(max(0.0, seconds - self._last_seconds), self._first)
        self._last_seconds, self._first = seconds, False


class EngineCollector(Collector):
    """Reads the engine's state and load at the time of a scrape."""

    def __init__(self, engine: ServingEngine) -> None:
        self._engine = engine
        self._expert_tokens = ExpertTokens()

    def describe(self) -> list[Metric]:
        """Nothing is read at registration: the engine may not have started."""
        return []

    def collect(self) -> Iterator[Metric]:
        load, state = self._engine.load(), self._engine.state()
        if (load.generation, load.epoch) == (state.generation, state.applied_epoch):
            self._expert_tokens.read(load.served, held_experts(state))
        yield from state_families(state)
        yield from load_families(load)
        yield self._busiest_experts()

    def _busiest_experts(self) -> CounterMetricFamily:
        family = declared.counter_family(declared.EXPERT_TOKENS)
        for (layer, expert), count in self._expert_tokens.busiest(MAX_EXPERT_SERIES):
            family.add_metric([str(layer), str(expert)], count)
        return family


def state_families(state: WorkerState) -> Iterator[Metric]:
    """Gauges of a WorkerState."""
    running = declared.gauge_family(declared.REQUESTS_RUNNING)
    running.add_metric([], state.requests_running)
    waiting = declared.gauge_family(declared.REQUESTS_WAITING)
    waiting.add_metric([], state.requests_waiting)
    blocks = declared.gauge_family(declared.KV_BLOCKS)
    blocks.add_metric(["used"], state.kv_blocks_used)
    blocks.add_metric(["cached"], state.kv_blocks_cached)
    num_free = state.kv_blocks_total - state.kv_blocks_used - state.kv_blocks_cached
    blocks.add_metric(["free"], num_free)
    epoch = declared.gauge_family(declared.PLAN_EPOCH)
    epoch.add_metric([], state.applied_epoch)
    yield from (running, waiting, blocks, epoch)
    if state.model is not None:
        kv_bytes = declared.gauge_family(declared.KV_BYTES_PER_TOKEN)
        kv_bytes.add_metric([], state.model.kv_bytes_per_token)
        yield kv_bytes
    if state.kv is not None:
        errors = declared.gauge_family(declared.KV_QUANTIZATION_ERROR)
        for layer, error in enumerate(state.kv.quantization_errors):
            if error is not None:
                errors.add_metric([str(layer)], error)
        yield errors


def load_families(load: LoadReport) -> Iterator[Metric]:
    """Counters of a LoadReport."""
    rank = declared.counter_family(declared.RANK_TOKENS)
    rank.add_metric([], sum(map(sum, load.served)))
    invalid = declared.counter_family(declared.INVALID_EXPERT_IDS)
    invalid.add_metric([], load.invalid_expert_ids)
    yield from (rank, invalid)


def held_experts(state: WorkerState) -> list[list[int]]:
    """`WorkerState.slots` as numbers; [] before there are slots."""
    if not state.slots:
        return []
    return [[int(expert) for expert in layer.split(",")] for layer in state.slots.split("|")]
