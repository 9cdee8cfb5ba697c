"""A worker process without a model: `serve.run` with signals and listeners, over a scripted engine.

Run as `python -m tests.support.fake_worker HOST DRAIN_SECONDS STEP_SECONDS [stays]`; `stays` = the
group never lets it go.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry

from moe_api import logs
from moe_api.worker import ModelConfig, WorkerConfig
from moe_worker.metrics import WorkerMetrics
from moe_worker.serve import Identity, ServeSettings, run
from tests.support.fake_engine import FakeEngine
from tests.support.http_worker import MODEL_NAME, TOKEN, byte_model


def alphabet(prompt: Sequence[int]) -> Iterator[int]:
    while True:
        yield from b"abcdefghijklmnopqrstuvwxyz"


def main(host: str, drain_seconds: str, step_seconds: str, stays: str = "") -> int:
    settings = ServeSettings(
        config=WorkerConfig(
            model=ModelConfig(path="/nowhere", served_name=MODEL_NAME),
            drain_seconds=int(drain_seconds),
        ),
        token=TOKEN,
        identity=Identity("default", "fake", 0, 0, "fake"),
        host=host,
    )
    logs.configure("info", settings.identity.log_context())
    metrics = WorkerMetrics(CollectorRegistry())
    engine = FakeEngine(
        alphabet, max_model_len=100_000, observer=metrics, step_seconds=float(step_seconds)
    )
    engine.left_group = not stays
    return asyncio.run(run(settings, engine, byte_model(), metrics))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
