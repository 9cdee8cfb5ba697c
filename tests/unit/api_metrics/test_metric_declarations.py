"""The declarations keep the names that dashboards rely on, and the rules for names and labels."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from moe_api import metrics

WORKER_NAMES = """
moe_requests_running moe_requests_waiting moe_requests_total{outcome}
moe_time_to_first_token_seconds moe_inter_token_latency_seconds moe_prompt_tokens_total
moe_generated_tokens_total moe_kv_blocks{state} moe_kv_bytes_per_token
moe_kv_quantization_error{layer} moe_invalid_expert_ids_total moe_kernels_info{implementation}
moe_kernels_warm_up_seconds
moe_prefix_cache_query_tokens_total moe_prefix_cache_hit_tokens_total
moe_step_seconds{phase} moe_expert_tokens_total{layer,expert}
moe_rank_tokens_total moe_expert_overflow_total{layer,action} moe_exchange_seconds{phase}
moe_exchange_bytes_total{scope} moe_plan_epoch moe_migration_bytes_total moe_swap_stall_seconds
moe_offload_lookups_total{result} moe_checkpoint_read_bytes moe_load_peak_resident_bytes
""".split()

OPERATOR_NAMES = """
moe_operator_reconcile_seconds moe_operator_reconcile_errors_total{reason}
moe_operator_queue_depth moe_deployment_imbalance{deployment}
moe_deployment_desired_units{deployment} moe_rebalance_total{verdict} moe_rebalance_stalled
moe_watch_age_seconds{kind} moe_leader
""".split()

ALL = metrics.WORKER + metrics.OPERATOR


def written(metric: metrics.AnyMetric) -> str:
    return metric.name + (f"{{{','.join(metric.labels)}}}" if metric.labels else "")


def test_the_names_are_the_contract() -> None:
    assert sorted(written(m) for m in metrics.WORKER) == sorted(WORKER_NAMES)
    assert sorted(written(m) for m in metrics.OPERATOR) == sorted(OPERATOR_NAMES)


def test_every_declaration_of_the_module_is_listed() -> None:
    declared = {v.name for v in vars(metrics).values() if isinstance(v, metrics.Metric)}
    assert declared == {m.name for m in ALL}
    assert len(declared) == len(ALL)


@pytest.mark.parametrize("metric", ALL, ids=lambda m: m.name)
def test_a_declaration_keeps_the_rules(metric: metrics.AnyMetric) -> None:
    assert metric.help.endswith(".")
    assert metric.name.endswith("_total") == (metric.kind is Counter)
    assert bool(metric.buckets) == (metric.kind is Histogram)
    if metric.kind is Histogram:
        assert metric.name.endswith("_seconds")
    assert not set(metric.labels) & {"user", "prompt", "path", "pid", "pod", "address", "model"}


@pytest.mark.parametrize("metric", ALL, ids=lambda m: m.name)
def test_a_registered_metric_appears_under_its_declared_name(metric: metrics.AnyMetric) -> None:
    registry = CollectorRegistry()
    made = metrics.register(metric, registry)
    child = made.labels(*["x"] * len(metric.labels)) if metric.labels else made
    if isinstance(child, Histogram):
        child.observe(0.1)
    else:
        child.inc()
    text = generate_latest(registry).decode()
    assert f"# HELP {metric.name} {metric.help}" in text
    assert "_created" not in text


def test_two_registries_do_not_share_values() -> None:
    first, second = CollectorRegistry(), CollectorRegistry()
    metrics.register(metrics.PLAN_EPOCH, first).set(7)
    metrics.register(metrics.PLAN_EPOCH, second)
    assert first.get_sample_value("moe_plan_epoch") == 7
    assert second.get_sample_value("moe_plan_epoch") == 0


def test_families_carry_the_declaration() -> None:
    counters = metrics.counter_family(metrics.EXPERT_TOKENS)
    counters.add_metric(["0", "3"], 5)
    assert [s.name for s in counters.samples] == ["moe_expert_tokens_total"]
    gauges = metrics.gauge_family(metrics.KV_BLOCKS)
    gauges.add_metric(["used"], 2)
    assert gauges.samples[0].labels == {"state": "used"}
    assert metrics.KV_BLOCKS.kind is Gauge
