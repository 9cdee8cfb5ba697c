"""The parent's side of the ranks' control API: one quick question at a time to each.

A rank that does not answer is a fact, not an error. Neighbours: `group` asks, `moe_worker.control`
answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import httpx

from moe_api import names
from moe_api.document import Document, DocumentError
from moe_api.load import LoadReport
from moe_api.plan import GroupPlan
from moe_api.worker import WorkerState

T = TypeVar("T")
AnyDocument = TypeVar("AnyDocument", bound=Document)
_ANSWER_SECONDS = 2.0


class ControlClient:
    def __init__(self, token: str, num_ranks: int) -> None:
        self._http = httpx.Client(
            headers={"Authorization": f"Bearer {token}"}, timeout=_ANSWER_SECONDS, trust_env=False
        )
        self._pool = ThreadPoolExecutor(min(num_ranks, 32), "ask")

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._http.close()

    def states(self, addresses: Sequence[str]) -> list[WorkerState | None]:
        return self._each(addresses, lambda a: self._get(a, names.CONTROL_STATE, WorkerState))

    def loads(self, addresses: Sequence[str]) -> list[LoadReport | None]:
        return self._each(addresses, lambda a: self._get(a, names.CONTROL_LOAD, LoadReport))

    def put_plan(self, addresses: Sequence[str], plan: GroupPlan) -> list[str | None]:
        """Why each did not take it; None = taken or known."""
        body = plan.to_json().encode()
        return self._each(addresses, lambda address: self._put(address, body))

    def _put(self, address: str, body: bytes) -> str | None:
        try:
            response = self._http.put(_url(address, names.CONTROL_PLAN), content=body)
        except httpx.HTTPError as error:
            return f"{type(error).__name__}: {error}"
        return None if response.is_success else f"{response.status_code}: {response.text[:200]}"

    def _get(self, address: str, route: str, kind: type[AnyDocument]) -> AnyDocument | None:
        try:
            response = self._http.get(_url(address, route))
            return kind.from_json(response.content) if response.is_success else None
        except (httpx.HTTPError, DocumentError):
            return None

    def _each(self, addresses: Sequence[str], ask: Callable[[str], T]) -> list[T]:
        return list(self._pool.map(ask, addresses))


def _url(address: str, route: str) -> str:
    return f"http://{address}:{names.CONTROL_PORT}{route}"
