"""Client of the workers' control API: many at once, and a silent worker is a fact, no exception.

`observe` reads states and loads, `groups` and `rebalance` put plans, `members` drains. Targets are
given as {key: address}; the answer for each key is the document or `Unreachable` with the reason.
Ports and routes are those of `moe_api.names`; the bearer token is given with each call because each
deployment has its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx

from moe_api import names
from moe_api.document import DocumentError
from moe_api.load import LoadReport
from moe_api.plan import GroupPlan
from moe_api.worker import DrainRequest, WorkerState
from moe_operator.settings import WorkerCallSettings

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


@dataclass(frozen=True)
class Unreachable:
    """This worker did not give a usable answer in time; `reason` says how it failed."""

    reason: str


@dataclass(frozen=True)
class PlanAnswer:
    """What a worker said to a plan: taken (or known already), or refused as not newer.

    `in_force` is the body of the answer: of a refusal, the plan's numbers in force there.
    """

    accepted: bool
    in_force: Mapping[str, Any]


class WorkerClient:
    """Thread-safe; every call ends within `settings.deadline_seconds` for each round of
    `max_parallel` workers."""

    def __init__(
        self,
        settings: WorkerCallSettings,
        monotonic: Callable[[], float],
        control_port: int = names.CONTROL_PORT,
    ) -> None:
        self._settings, self._monotonic, self._port = settings, monotonic, control_port
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
        timeout = httpx.Timeout(settings.deadline_seconds, connect=settings.connect_timeout_seconds)
        # Pods are asked by address: a proxy from the environment must not come between.
        self._http = httpx.Client(timeout=timeout, limits=limits, trust_env=False)
        self._pool = ThreadPoolExecutor(settings.max_parallel, thread_name_prefix="worker-call")

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._http.close()

    def states(self, targets: Mapping[K, str], token: str) -> dict[K, WorkerState | Unreachable]:
        return self._each(targets, lambda address: self._document(
            "GET", address, names.CONTROL_STATE, token, None, WorkerState.from_json
        ))  # fmt: skip

    def loads(self, targets: Mapping[K, str], token: str) -> dict[K, LoadReport | Unreachable]:
        return self._each(targets, lambda address: self._document(
            "GET", address, names.CONTROL_LOAD, token, None, LoadReport.from_json
        ))  # fmt: skip

    def put_plans(
        self, targets: Mapping[K, str], plan: GroupPlan, token: str
    ) -> dict[K, PlanAnswer | Unreachable]:
        """Announce one plan to many; it must have been stored before."""
        body = plan.to_json().encode()
        return self._each(targets, lambda address: self._put_plan(address, body, token))

    def drain(
        self, targets: Mapping[K, str], request: DrainRequest, token: str
    ) -> dict[K, bool | Unreachable]:
        """Ask to stop admission and finish; True = the worker agreed."""
        body = request.to_json().encode()
        return self._each(targets, lambda address: self._document(
            "POST", address, names.CONTROL_DRAIN, token, body, lambda _: True
        ))  # fmt: skip

    def _put_plan(self, address: str, body: bytes, token: str) -> PlanAnswer | Unreachable:
        answer = self._call("PUT", address, names.CONTROL_PLAN, token, body)
        if isinstance(answer, Unreachable):
            return answer
        status, content = answer
        if status != 409 and not 200 <= status < 300:
            return _unexpected(status, content)
        try:
            told = json.loads(content) if content else {}
        except ValueError as error:
            return Unreachable(f"answer to the plan is not JSON: {error}")
        return PlanAnswer(accepted=status != 409, in_force=told if isinstance(told, dict) else {})

    def _document(
        self, method: str, address: str, route: str, token: str, body: bytes | None,
        read: Callable[[bytes], T],
    ) -> T | Unreachable:  # fmt: skip
        answer = self._call(method, address, route, token, body)
        if isinstance(answer, Unreachable):
            return answer
        status, content = answer
        if not 200 <= status < 300:
            return _unexpected(status, content)
        try:
            return read(content)
        except DocumentError as error:
            return Unreachable(f"unreadable answer: {error}")

    def _call(
        self, method: str, address: str, route: str, token: str, body: bytes | None
    ) -> tuple[int, bytes] | Unreachable:
        """Status and whole body; bounded in time and size even when the body only trickles."""
        end = self._monotonic() + self._settings.deadline_seconds
        host = f"[{address}]" if ":" in address else address
        headers = {"Authorization": f"Bearer {token}"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        content = bytearray()
        try:
            with self._http.stream(
                method, f"http://{host}:{self._port}{route}", headers=headers, content=body
            ) as response:
                for chunk in response.iter_bytes():
                    content += chunk
                    if len(content) > self._settings.max_answer_bytes:
                        return Unreachable(
                            f"answer is longer than {self._settings.max_answer_bytes} bytes"
                        )
                    if self._monotonic() > end:
                        return Unreachable(
                            f"no whole answer within {self._settings.deadline_seconds} s"
                        )
                return response.status_code, bytes(content)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return Unreachable(f"{type(error).__name__}: {error}".rstrip(": "))

    def _each(self, targets: Mapping[K, str], call: Callable[[str], T]) -> dict[K, T]:
        answers = self._pool.map(call, targets.values())
        return dict(zip(targets, answers, strict=True))


def _unexpected(status: int, content: bytes) -> Unreachable:
    return Unreachable(f"answered {status}: {content[:200].decode(errors='replace')}")
