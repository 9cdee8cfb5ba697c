"""The connections to the server that is measured, and what is asked of it besides completions.

Neighbour: `exchange` is one request.
"""

from __future__ import annotations

import asyncio
import json
from types import TracebackType

import httpx

from moe_worker.bench.exchange import Exchange, Limits, to_body
from moe_worker.bench.failure import Failure, beginning, broken, refusal
from moe_worker.bench.prompts import Prompt
from moe_worker.bench.record import Outcome, Record
from moe_worker.bench.target import Target

MAX_MODELS_BYTES = 16 * 2**20
IDLE_SECONDS = 2.0
"""Connections are used again for so long: less than servers keep them, so that none breaks because
the server closes it in the moment in which it is taken."""


class Client:
    """Speaks with the given server alone: no proxy, no redirect is followed."""

    def __init__(self, api_key: str | None, limits: Limits) -> None:
        key = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._limits = limits
        self._http = httpx.AsyncClient(
            headers={"Accept-Encoding": "identity", **key},
            timeout=None,  # a deadline of ours holds for the whole of a request
            trust_env=False,
            limits=httpx.Limits(
                max_connections=limits.connections,
                max_keepalive_connections=limits.connections,
                keepalive_expiry=IDLE_SECONDS,
            ),
        )

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._http.aclose()

    async def send(self, target: Target, prompt: Prompt, due_seconds: float) -> Record:
        """Send one request now and see it end. `due_seconds`: of the event loop's clock."""
        now = asyncio.get_running_loop().time
        exchange = Exchange(self._http, self._limits, due_seconds, now)
        return await exchange.run(target.url, to_body(target.body(prompt)))

    async def first_model(self, base_url: str) -> str:
        """Id of the first model that the server lists.

        Raises:
            Failure: why there is none.
        """
        listed = await self._get_json(f"{base_url}/models")
        models = listed.get("data") if isinstance(listed, dict) else None
        first = models[0] if isinstance(models, list) and models else None
        name = first.get("id") if isinstance(first, dict) else None
        if not isinstance(name, str):
            raise Failure(Outcome.MALFORMED, "the answer lists no model")
        return name

    async def _get_json(self, url: str) -> object:
        try:
            async with asyncio.timeout(self._limits.timeout_seconds):
                async with self._http.stream("GET", url) as response:
                    if response.status_code != 200:
                        raise await refusal(response)
                    body = await beginning(response.aiter_bytes(), MAX_MODELS_BYTES)
        except TimeoutError as error:
            detail = f"no answer within {self._limits.timeout_seconds:g} s"
            raise Failure(Outcome.TIMED_OUT, detail) from error
        except httpx.HTTPError as error:
            raise broken(error) from error
        try:
            parsed: object = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise Failure(Outcome.MALFORMED, f"the answer is no JSON: {body[:60]!r}") from error
        return parsed
