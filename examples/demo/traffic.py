"""Closed-loop traffic against every rank, counting honestly what became of each request: a
recorded set once, or again and again."""

from __future__ import annotations

import itertools
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import httpx

from examples.demo.forward import Forward
from examples.demo.kube import DemoError
from examples.demo.recording import Recorded

MAX_RETRIES = 40
REQUEST_SECONDS = 60


@dataclass
class Outcomes:
    """Per target: how its requests ended. `done_at` holds when answers came (monotonic seconds)."""

    finished: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    retried: int = 0
    tokens: int = 0
    errors: list[str] = field(default_factory=list)
    done_at: list[tuple[float, str]] = field(default_factory=list)


class Traffic:
    """`per_target` threads for each forward send what was recorded for its rank, once or until
    `stop`.

    A 503 or 429 with Retry-After is an answer ("not now"), so the request is sent again and
    counted as retried; everything else that is no 200 is a failure of the rank it was sent to.
    """

    def __init__(
        self, forwards: Sequence[Forward], model: str, recorded: Sequence[Recorded],
        per_target: int, max_tokens: int, *, once: bool = False,
    ) -> None:  # fmt: skip
        self.outcomes = Outcomes()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._model, self._max_tokens = model, max_tokens
        self._gone: set[str] = set()
        self._threads = []
        for rank, forward in enumerate(forwards):
            mine = [record for record in recorded if record.rank == rank]
            queue = iter(mine) if once else itertools.cycle(mine)
            self._threads += [
                threading.Thread(target=self._drive, args=(forward, queue), daemon=True)
                for _ in range(per_target)
            ]
        for thread in self._threads:
            thread.start()

    def give_up_on(self, target: str) -> None:
        """Send nothing more to a target that was killed; what it still had in flight counts."""
        self._gone.add(target)

    @property
    def running(self) -> bool:
        """Whether something is still to be sent or answered."""
        return any(thread.is_alive() for thread in self._threads)

    def stop(self) -> Outcomes:
        self._stop.set()
        for thread in self._threads:
            thread.join(REQUEST_SECONDS)
        return self.outcomes

    def _drive(self, forward: Forward, queue: Iterator[Recorded]) -> None:
        with httpx.Client(timeout=REQUEST_SECONDS, trust_env=False) as client:
            while not self._stop.is_set() and forward.target not in self._gone:
                with self._lock:
                    record = next(queue, None)
                if record is None:
                    return
                self._one(client, forward, record)

    def _one(self, client: httpx.Client, forward: Forward, record: Recorded) -> None:
        body = {
            "model": self._model, "prompt": record.prompt, "max_tokens": self._max_tokens,
            "temperature": 0.8, "seed": record.seed,
            # Of its own for each request: what the prefix cache has is not routed again.
            "cache_salt": uuid.uuid4().hex,
        }  # fmt: skip
        for _ in range(MAX_RETRIES):
            try:
                answer = client.post(f"{forward.url()}/v1/completions", json=body)
            except (httpx.HTTPError, DemoError) as error:
                self._count_failure(forward.target, f"{type(error).__name__}: {error}")
                return
            if answer.status_code == 200:
                self._count_success(forward.target, answer.json()["usage"]["total_tokens"])
                return
            if "retry-after" not in answer.headers:
                self._count_failure(forward.target, f"{answer.status_code}: {answer.text[:200]}")
                return
            with self._lock:
                self.outcomes.retried += 1
            if self._stop.wait(min(2.0, float(answer.headers["retry-after"]))):
                return
        self._count_failure(forward.target, f"still refused after {MAX_RETRIES} tries")

    def _count_success(self, target: str, tokens: int) -> None:
        with self._lock:
            self.outcomes.finished[target] += 1
            self.outcomes.tokens += tokens
            self.outcomes.done_at.append((time.monotonic(), target))

    def _count_failure(self, target: str, error: str) -> None:
        with self._lock:
            self.outcomes.failed[target] += 1
            if len(self.outcomes.errors) < 20:
                self.outcomes.errors.append(f"{target}: {error}")
