"""One run against a server: find the model, ask once, warm up, measure.

Neighbours: `session` starts it and ends it early, `drive` is its loop.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console

from moe_worker.bench.arrivals import arrivals
from moe_worker.bench.bench_error import BenchError
from moe_worker.bench.client import Client
from moe_worker.bench.drive import Clock, drive
from moe_worker.bench.exchange import Limits
from moe_worker.bench.failure import Failure
from moe_worker.bench.measurement import Measurement
from moe_worker.bench.options import Options
from moe_worker.bench.progress import Bar
from moe_worker.bench.prompts import FilePrompt, Prompt, Synthetic, from_file
from moe_worker.bench.record import Record
from moe_worker.bench.target import Target
from moe_worker.bench.words import WORDS, WordTokens, fitted

PROBES = (WORDS[:8], WORDS)
"""Two prompts that tell how many tokens a word has, on average over all words."""
SHOWN_EVERY_SECONDS = 0.25


class Experiment:
    """What was measured stays here when the run is cancelled."""

    def __init__(self, options: Options, source: Sequence[FilePrompt] | Synthetic) -> None:
        self._options = options
        self._source = source
        self._clock = Clock(asyncio.get_running_loop().time, asyncio.sleep)
        self.model = options.model
        self.measurement: Measurement | None = None
        """None = it has not begun."""
        self.is_complete = False

    async def measure(self) -> None:
        """
        Raises:
            BenchError: the server can not be measured; says what was tried.
        """
        options = self._options
        connections = options.traffic.most_at_once
        limits = Limits(options.timeout_seconds, options.max_retries, connections)
        async with Client(options.api_key, limits) as client:
            self.model = await self._find_model(client)
            target = Target(options.base_url, options.endpoint, self.model, options.sampling)
            scale = await self._probe(client, target)
            await self._warm_up(client, target, scale)
            self.measurement = self._new_measurement()
            with self._shown(self.measurement):
                await self._drive(client, target, scale, self.measurement)
        self.is_complete = True

    async def _find_model(self, client: Client) -> str:
        if self._options.model is not None:
            return self._options.model
        base_url = self._options.base_url
        try:
            return await client.first_model(base_url)
        except Failure as failure:
            raise BenchError(
                f"GET {base_url}/models failed, {failure.outcome}: {failure.detail}; is --url "
                "right, does it want --api-key-file, does --model have to be given?"
            ) from failure

    async def _probe(self, client: Client, target: Target) -> WordTokens:
        """One or two requests that are not measured: does it answer, how many tokens is a word?"""
        if not isinstance(self._source, Synthetic):
            await self._ask(client, target, Prompt(self._source[0].content, 1))
            return WordTokens()
        sizes: list[tuple[int, int]] = []
        for words in PROBES:
            record = await self._ask(client, target, Prompt(" ".join(words), 1))
            if record.tokens.input is None:
                return WordTokens()
            sizes.append((len(words), record.tokens.input))
        return fitted(*sizes)

    async def _ask(self, client: Client, target: Target, prompt: Prompt) -> Record:
        record = await client.send(target, prompt, self._clock.now())
        if not record.is_ok:
            raise BenchError(
                f"POST {target.url} with model {target.model!r} failed, "
                f"{record.outcome}: {record.detail}"
            )
        return record

    async def _warm_up(self, client: Client, target: Target, scale: WordTokens) -> None:
        """What fails here is left to the measurement to find."""
        options = self._options
        await drive(
            itertools.repeat(None, options.warmup),
            self._prompts(scale, "warm-up"),
            lambda prompt, due: client.send(target, prompt, due),
            self._new_measurement(),
            min(options.traffic.most_at_once, options.warmup),
            self._clock.now() + options.duration_seconds,
            self._clock,
        )

    async def _drive(
        self, client: Client, target: Target, scale: WordTokens, measurement: Measurement
    ) -> None:
        options = self._options
        offsets = arrivals(
            options.traffic,
            options.num_requests,
            options.duration_seconds,
            self._random("arrivals"),
        )
        await drive(
            offsets,
            self._prompts(scale, "measured"),
            lambda prompt, due: client.send(target, prompt, due),
            measurement,
            min(options.traffic.most_at_once, options.num_requests),
            measurement.began_seconds + options.duration_seconds,
            self._clock,
        )

    @contextmanager
    def _shown(self, measurement: Measurement) -> Iterator[None]:
        options = self._options
        bar = Bar(Console(stderr=True), options.num_requests, options.duration_seconds)

        async def show() -> None:
            while True:
                bar.show(measurement, self._clock.now())
                await self._clock.sleep(SHOWN_EVERY_SECONDS)

        with bar.shown():
            showing = asyncio.create_task(show())
            try:
                yield
            finally:
                showing.cancel()

    def _prompts(self, scale: WordTokens, stage: str) -> Iterator[Prompt]:
        """Each stage has texts of its own; what all prompts begin with is the same in all."""
        max_tokens = self._options.max_tokens
        if isinstance(self._source, Synthetic):
            prefix, rest = self._random("prefix"), self._random(stage)
            return self._source.prompts(max_tokens, scale, prefix, rest)
        return from_file(self._source, max_tokens, self._random(stage))

    def _new_measurement(self) -> Measurement:
        return Measurement(self._clock.now(), self._options.objective, self._options.seed)

    def _random(self, purpose: str) -> random.Random:
        return random.Random(f"{self._options.seed}/{purpose}")
