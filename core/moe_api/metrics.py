"""Every metric of operator and worker, declared once: name, kind, labels, help.

`moe_worker.metrics` and the operator fill them; dashboards, alerts and documents quote them from
here. Labels are bounded by configuration (layers, states, enumerations): none holds a prompt, a
user, a path, an address or a process id.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

Kind = TypeVar("Kind", Counter, Gauge, Histogram)

LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Seconds; what a user waits for."""
STEP_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
"""Seconds; parts of one engine step."""


@dataclass(frozen=True)
class Metric(Generic[Kind]):
    """One declaration. `kind` is the client library's class that will count it."""

    name: str
    kind: type[Kind]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds in the metric's unit, histograms only."""


def register(metric: Metric[Kind], registry: CollectorRegistry) -> Kind:
    """Make the declared metric in `registry`.

    Raises:
        ValueError: the registry already holds a metric of this name.
    """
    # The library's extra `_created` series double the number of series and answer nothing here.
    prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
    shape: dict[str, Any] = {"buckets": metric.buckets} if metric.buckets else {}
    return metric.kind(metric.name, metric.help, metric.labels, registry=registry, **shape)


def counter_family(metric: Metric[Counter]) -> CounterMetricFamily:
    """Empty family of a counter whose values are read somewhere else at the time of a scrape."""
    return CounterMetricFamily(metric.name, metric.help, labels=metric.labels)


def gauge_family(metric: Metric[Gauge]) -> GaugeMetricFamily:
    """Empty family of a gauge whose values are read somewhere else at the time of a scrape."""
    return GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)


# Worker: requests.
REQUESTS_RUNNING = Metric(
    "moe_requests_running", Gauge, "Requests that own KV blocks and take part in steps."
)
REQUESTS_WAITING = Metric("moe_requests_waiting", Gauge, "Admitted requests without KV blocks.")
REQUESTS = Metric(
    "moe_requests_total",
    Counter,
    "Generation requests answered, by how they ended.",
    ("outcome",),
)
TIME_TO_FIRST_TOKEN = Metric(
    "moe_time_to_first_token_seconds",
    Histogram,
    "From the request's arrival to its first generated token.",
    buckets=LATENCY_BUCKETS,
)
INTER_TOKEN_LATENCY = Metric(
    "moe_inter_token_latency_seconds",
    Histogram,
    "Between two generated tokens of one request.",
    buckets=LATENCY_BUCKETS,
)
PROMPT_TOKENS = Metric(
    "moe_prompt_tokens_total", Counter, "Prompt tokens of requests that the engine admitted."
)
GENERATED_TOKENS = Metric(
    "moe_generated_tokens_total", Counter, "Tokens generated and handed to requests."
)

# Worker: KV cache and kernels.
KV_BLOCKS = Metric("moe_kv_blocks", Gauge, "KV blocks by state (used, cached, free).", ("state",))
KV_BYTES_PER_TOKEN = Metric(
    "moe_kv_bytes_per_token", Gauge, "Bytes of KV cache that one token takes, all layers."
)
KV_QUANTIZATION_ERROR = Metric(
    "moe_kv_quantization_error",
    Gauge,
    "Relative L2 error of keys or values, the larger, in the newest sample of a layer.",
    ("layer",),
)
PREFIX_CACHE_QUERY_TOKENS = Metric(
    "moe_prefix_cache_query_tokens_total",
    Counter,
    "Tokens of the prompts that began: what the prefix cache could have held.",
)
PREFIX_CACHE_HIT_TOKENS = Metric(
    "moe_prefix_cache_hit_tokens_total",
    Counter,
    "Prompt tokens whose KV blocks were found in the prefix cache.",
)
CHECKPOINT_READ_BYTES = Metric(
    "moe_checkpoint_read_bytes", Gauge, "Bytes of the checkpoint read until weights were complete."
)
LOAD_PEAK_BYTES = Metric(
    "moe_load_peak_resident_bytes",
    Gauge,
    "Most memory of the process until weights were complete, mapped files included.",
)
KERNELS_INFO = Metric(
    "moe_kernels_info", Gauge, "1 for the kernel implementation in use.", ("implementation",)
)
WARM_UP_SECONDS = Metric(
    "moe_kernels_warm_up_seconds",
    Gauge,
    "Time that compiling or loading the kernels took at this start; 0 until they are ready.",
)

# Worker: steps, experts, exchange.
STEP_SECONDS = Metric(
    "moe_step_seconds",
    Histogram,
    "Time of one engine step by phase (schedule, agree, run, publish).",
    ("phase",),
    buckets=STEP_BUCKETS,
)
EXPERT_TOKENS = Metric(
    "moe_expert_tokens_total",
    Counter,
    "Tokens that an expert held here received; only the busiest experts are shown.",
    ("layer", "expert"),
)
RANK_TOKENS = Metric(
    "moe_rank_tokens_total", Counter, "Tokens that all experts held here received, all layers."
)
EXPERT_OVERFLOW = Metric(
    "moe_expert_overflow_total",
    Counter,
    "Tokens past an expert's capacity by layer and by what was done with them.",
    ("layer", "action"),
)
INVALID_EXPERT_IDS = Metric(
    "moe_invalid_expert_ids_total",
    Counter,
    "Expert ids outside the model's range that the router produced; always 0 in a healthy worker.",
)
EXCHANGE_SECONDS = Metric(
    "moe_exchange_seconds",
    Histogram,
    "Time of one exchange with the group by phase (agree, dispatch, combine).",
    ("phase",),
    buckets=STEP_BUCKETS,
)
EXCHANGE_BYTES = Metric(
    "moe_exchange_bytes_total",
    Counter,
    "Bytes sent to members by scope (self, domain, remote).",
    ("scope",),
)

# Worker: plans and weights.
PLAN_EPOCH = Metric("moe_plan_epoch", Gauge, "Epoch of the placement in force, 0 before the first.")
MIGRATION_BYTES = Metric(
    "moe_migration_bytes_total", Counter, "Bytes of expert weights copied here by rebalances."
)
SWAP_STALL = Metric(
    "moe_swap_stall_seconds",
    Histogram,
    "Longest gap between two steps at a switch of epochs, less the median gap.",
    buckets=STEP_BUCKETS,
)
OFFLOAD_LOOKUPS = Metric(
    "moe_offload_lookups_total",
    Counter,
    "Lookups of experts in the device's slot cache by result (hit, miss, late).",
    ("result",),
)

# Operator.
RECONCILE_SECONDS = Metric(
    "moe_operator_reconcile_seconds",
    Histogram,
    "Time of one reconciliation of one MoEDeployment.",
    buckets=LATENCY_BUCKETS,
)
RECONCILE_ERRORS = Metric(
    "moe_operator_reconcile_errors_total",
    Counter,
    "Reconciliations that failed and will be tried again, by reason.",
    ("reason",),
)
QUEUE_DEPTH = Metric("moe_operator_queue_depth", Gauge, "MoEDeployments waiting to be reconciled.")
DEPLOYMENT_IMBALANCE = Metric(
    "moe_deployment_imbalance",
    Gauge,
    "Largest rank load over mean rank load of the worst layer, measured from served tokens.",
    ("deployment",),
)
DEPLOYMENT_DESIRED_UNITS = Metric(
    "moe_deployment_desired_units",
    Gauge,
    "Units (groups or ranks) that autoscaling wants.",
    ("deployment",),
)
REBALANCE = Metric(
    "moe_rebalance_total", Counter, "Decisions about rebalancing by verdict.", ("verdict",)
)
REBALANCE_STALLED = Metric(
    "moe_rebalance_stalled", Gauge, "1 while a rebalance makes no progress within its deadline."
)
WATCH_AGE = Metric(
    "moe_watch_age_seconds", Gauge, "Time since the last event or resync of a watch.", ("kind",)
)
LEADER = Metric("moe_leader", Gauge, "1 while this operator holds the lease.")

AnyMetric = Metric[Counter] | Metric[Gauge] | Metric[Histogram]

WORKER: tuple[AnyMetric, ...] = (
    REQUESTS_RUNNING,
    REQUESTS_WAITING,
    REQUESTS,
    TIME_TO_FIRST_TOKEN,
    INTER_TOKEN_LATENCY,
    PROMPT_TOKENS,
    GENERATED_TOKENS,
    KV_BLOCKS,
    KV_BYTES_PER_TOKEN,
    KV_QUANTIZATION_ERROR,
    PREFIX_CACHE_QUERY_TOKENS,
    PREFIX_CACHE_HIT_TOKENS,
    CHECKPOINT_READ_BYTES,
    LOAD_PEAK_BYTES,
    KERNELS_INFO,
    WARM_UP_SECONDS,
    STEP_SECONDS,
    EXPERT_TOKENS,
    RANK_TOKENS,
    EXPERT_OVERFLOW,
    INVALID_EXPERT_IDS,
    EXCHANGE_SECONDS,
    EXCHANGE_BYTES,
    PLAN_EPOCH,
    MIGRATION_BYTES,
    SWAP_STALL,
    OFFLOAD_LOOKUPS,
)

OPERATOR: tuple[AnyMetric, ...] = (
    RECONCILE_SECONDS,
    RECONCILE_ERRORS,
    QUEUE_DEPTH,
    DEPLOYMENT_IMBALANCE,
    DEPLOYMENT_DESIRED_UNITS,
    REBALANCE,
    REBALANCE_STALLED,
    WATCH_AGE,
    LEADER,
)
