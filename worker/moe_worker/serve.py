"""`moe-worker serve`: one worker, from its settings to its exit code.

`assemble` builds the engine, `server` and `control` are its two doors, `shutdown` ends it. Both
doors live in one event loop; the engine has a thread of its own.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry

from moe_api import names
from moe_api.worker import ApiLimits, WorkerConfig
from moe_worker.api.api_key import ApiKeys
from moe_worker.api.served_model import ServedModel
from moe_worker.api.server import public_app
from moe_worker.api.traffic import Traffic
from moe_worker.control import control_app
from moe_worker.listener import Listener, bind
from moe_worker.metrics import EngineCollector, WorkerMetrics
from moe_worker.serving_engine import ServingEngine
from moe_worker.shutdown import Shutdown

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Identity:
    """Which worker this is; told by whoever started the process."""

    namespace: str
    deployment: str
    group: int
    member: int
    incarnation: str
    """New for every process (pod UID): counters began at zero with it, plans name it."""

    def log_context(self) -> dict[str, object]:
        """What is the same in every log line of this process."""
        return {
            "namespace": self.namespace,
            "deployment": self.deployment,
            "group": self.group,
            "member": self.member,
        }


@dataclass(frozen=True)
class ServeSettings:
    """Everything that `serve` needs to know, read once by `main`."""

    config: WorkerConfig
    token: str
    """Bearer token of the control API, the same for all members."""
    identity: Identity
    host: str
    """Where both listeners are bound; plans say where members reach each other."""
    http_port: int = names.HTTP_PORT
    control_port: int = names.CONTROL_PORT
    threads: int = 1
    """Threads of one tensor operation."""


def serve(settings: ServeSettings) -> int:
    """Serve until a signal ends it. Needs the main thread (signals). Returns the exit code.

    Raises:
        AddressInUse: a port is taken.
        ApiKeysUnusable: the configuration names a file of keys that is none.
    """
    from moe_worker.assemble import assemble  # torch: only a process that computes pays for it

    metrics = WorkerMetrics(CollectorRegistry())
    engine, model = assemble(settings, metrics)
    return asyncio.run(run(settings, engine, model, metrics))


async def run(
    settings: ServeSettings,
    engine: ServingEngine,
    model: ServedModel | None,
    metrics: WorkerMetrics,
) -> int:
    """Open both doors, run the engine, close all of it in order."""
    traffic = Traffic()
    keys = api_keys(settings.config.api)
    shutdown = Shutdown(engine, traffic, settings.config.drain_seconds)
    metrics.registry.register(EngineCollector(engine))
    with ThreadPoolExecutor(1, "tokenizer") as tokenizer_thread:
        public = Listener(
            public_app(
                engine, model, settings.config.api, traffic, metrics, tokenizer_thread, keys
            ),
            bind(settings.host, settings.http_port),
        )
        control = Listener(
            control_app(engine, settings.token, shutdown.begin_drain),
            bind(settings.host, settings.control_port),
        )
        _listen_to_signals(shutdown)
        engine.start()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(public.run_until_closed())
                tasks.create_task(control.run_until_closed())
                await public.listening.wait()
                await control.listening.wait()
                logger.info("listening: public %s, control %s", public.url, control.url)
                exit_code = await shutdown.run()
                public.close()
                control.close()
        finally:
            await asyncio.to_thread(engine.stop)
    return exit_code


def api_keys(limits: ApiLimits) -> ApiKeys | None:
    """None where the configuration asks for no key. Raises ApiKeysUnusable."""
    return None if limits.key_file is None else ApiKeys(Path(limits.key_file))


def _listen_to_signals(shutdown: Shutdown) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, shutdown.on_signal)
