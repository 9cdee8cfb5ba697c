"""The operator's own metrics, made from the declarations of `moe_api.metrics` in one registry.

`main` builds it once and gives it to the queue, the watches and the reconcile passes; `probes`
serves it as text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily

from moe_api import metrics as declared


class OperatorMetrics:
    """Counters and gauges by the names they are declared under; thread-safe like the library."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.reconcile_seconds = declared.register(declared.RECONCILE_SECONDS, registry)
        self.reconcile_errors = declared.register(declared.RECONCILE_ERRORS, registry)
        self.queue_depth = declared.register(declared.QUEUE_DEPTH, registry)
        self.deployment_imbalance = declared.register(declared.DEPLOYMENT_IMBALANCE, registry)
        self.deployment_desired_units = declared.register(
            declared.DEPLOYMENT_DESIRED_UNITS, registry
        )
        self.rebalance = declared.register(declared.REBALANCE, registry)
        self.rebalance_stalled = declared.register(declared.REBALANCE_STALLED, registry)
        self.leader = declared.register(declared.LEADER, registry)

    def watch_ages(self, ages: Callable[[], Mapping[str, float]]) -> None:
        """Export `ages()` ({kind: seconds}) at every scrape."""
        self.registry.register(_WatchAges(ages))

    def render(self) -> bytes:
        """Text exposition of everything."""
        return generate_latest(self.registry)


class _WatchAges:
    def __init__(self, ages: Callable[[], Mapping[str, float]]) -> None:
        self._ages = ages

    def collect(self) -> list[GaugeMetricFamily]:
        family = declared.gauge_family(declared.WATCH_AGE)
        for kind, seconds in self._ages().items():
            family.add_metric([kind], seconds)
        return [family]
