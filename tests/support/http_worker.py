"""Both listeners of a worker on free ports of this process, over a scripted engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace

import httpx
from prometheus_client import CollectorRegistry

from moe_api.worker import ApiLimits
from moe_worker.api.api_key import ApiKeys
from moe_worker.api.served_model import ServedModel
from moe_worker.api.server import public_app
from moe_worker.api.traffic import Traffic
from moe_worker.control import control_app
from moe_worker.listener import Listener, bind
from moe_worker.metrics import EngineCollector, WorkerMetrics
from moe_worker.serving_engine import ServingEngine
from moe_worker.shutdown import Shutdown
from moe_worker.text.chat_template import ChatTemplate
from moe_worker.text.grammar import Grammars
from moe_worker.text.prompt_tokenizer import PromptTokenizer
from tests.support.byte_tokenizer import CHAT_TEMPLATE, END, TOOL_TEMPLATE, byte_tokenizer

MODEL_NAME = "byte-moe"
TOKEN = "control-secret"


def byte_model() -> ServedModel:
    """A model whose tokens are bytes; its stop token is the end of a turn."""
    tokenizer = byte_tokenizer()
    vocab_size, stops = tokenizer.get_vocab_size(), frozenset({tokenizer.token_to_id(END)})
    return ServedModel(
        name=MODEL_NAME,
        tokenizer=PromptTokenizer(tokenizer),
        template=ChatTemplate(CHAT_TEMPLATE, {}),
        vocab_size=vocab_size,
        stop_token_ids=stops,
        grammars=Grammars(tokenizer, vocab_size, stops),
    )


def model_with_tools() -> ServedModel:
    """The same model, with a template that knows tools."""
    return replace(byte_model(), template=ChatTemplate(TOOL_TEMPLATE, {}))


@dataclass
class HttpWorker:
    public_url: str
    control_url: str
    metrics: WorkerMetrics
    traffic: Traffic
    loop: asyncio.AbstractEventLoop

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.public_url, timeout=20)

    def control(self) -> httpx.Client:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        return httpx.Client(base_url=self.control_url, headers=headers, timeout=20)

    def outcomes(self) -> dict[str, int]:
        """Requests by outcome, those that happened."""
        found = {}
        for family in self.metrics.registry.collect():
            for sample in family.samples:
                if sample.name == "moe_requests_total" and sample.value:
                    found[sample.labels["outcome"]] = int(sample.value)
        return found


@contextmanager
def http_worker(
    engine: ServingEngine,
    limits: ApiLimits | None = None,
    model: ServedModel | None = None,
    keys: ApiKeys | None = None,
) -> Iterator[HttpWorker]:
    """Runs until the block ends; the engine is started and stopped too."""
    started = threading.Event()
    workers: list[HttpWorker] = []
    listeners: list[Listener] = []

    async def serve() -> None:
        traffic = Traffic()
        metrics = WorkerMetrics(CollectorRegistry())
        metrics.registry.register(EngineCollector(engine))
        shutdown = Shutdown(engine, traffic, drain_seconds=60)
        with ThreadPoolExecutor(1) as tokenizer_thread:
            public = Listener(
                public_app(
                    engine,
                    model or byte_model(),
                    limits or ApiLimits(),
                    traffic,
                    metrics,
                    tokenizer_thread,
                    keys,
                ),
                bind("127.0.0.1", 0),
            )
            control = Listener(
                control_app(engine, TOKEN, shutdown.begin_drain), bind("127.0.0.1", 0)
            )
            listeners.extend([public, control])
            running = [asyncio.create_task(x.run_until_closed()) for x in listeners]
            await public.listening.wait()
            await control.listening.wait()
            loop = asyncio.get_running_loop()
            workers.append(HttpWorker(public.url, control.url, metrics, traffic, loop))
            started.set()
            await asyncio.gather(*running)

    engine.start()
    thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
    thread.start()
    assert started.wait(20), "the listeners did not start"
    try:
        yield workers[0]
    finally:
        engine.stop()
        for listener in listeners:
            workers[0].loop.call_soon_threadsafe(listener.close)
        thread.join(20)
        assert not thread.is_alive(), "the listeners did not close"
