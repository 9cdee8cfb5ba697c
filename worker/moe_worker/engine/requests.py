"""The requests that this engine has taken and not yet ended: who is told what.

Each gets its tokens and then exactly one `Finished`. Submitted and cancelled from any thread, told
from the engine's. Neighbours: `scheduler` has the sequences, `events` is what is told.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from dataclasses import dataclass

from moe_worker.engine.events import (
    Event,
    EventSink,
    Finished,
    FinishReason,
    Prompt,
    Token,
    TokenLogprobs,
)
from moe_worker.engine.observer import Observer
from moe_worker.engine.sequence import Sequence

logger = logging.getLogger(__name__)


@dataclass
class _Request:
    seq: Sequence
    sink: EventSink
    num_told: int = 0
    told_prompt: bool = False


class Requests:
    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._lock = threading.Lock()
        self._requests: dict[str, _Request] = {}
        self._cancelled: set[str] = set()

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, seq: Sequence, sink: EventSink) -> None:
        """Raises ValueError when the id is in use."""
        with self._lock:
            if seq.request_id in self._requests:
                raise ValueError(f"request id {seq.request_id} is in use")
            self._requests[seq.request_id] = _Request(seq, sink)

    def drop(self, request_id: str) -> None:
        """Forget a request that was not taken after all; it is told nothing."""
        with self._lock:
            self._requests.pop(request_id, None)

    def cancel(self, request_id: str) -> bool:
        with self._lock:
            known = request_id in self._requests
            if known:
                self._cancelled.add(request_id)
            return known

    def take_cancelled(self) -> set[str]:
        with self._lock:
            taken, self._cancelled = self._cancelled, set()
            return taken

    def ids(self) -> list[str]:
        with self._lock:
            return list(self._requests)

    def tell_prompt(self, request_id: str, logprobs: Iterable[TokenLogprobs], done: bool) -> None:
        """Note what is known of the probabilities of a prompt; `done`: all of it is computed."""
        request = self._requests.get(request_id)
        if request is None:
            return
        request.seq.prompt_logprobs += logprobs
        if done and not request.told_prompt:
            request.told_prompt = True
            seq = request.seq
            self._observer.prompt_computed(len(seq.prompt), seq.num_cached_tokens)
            self._send(request, Prompt(seq.num_cached_tokens, tuple(seq.prompt_logprobs)))

    def tell_tokens(self, request_id: str, logprobs: TokenLogprobs | None = None) -> int:
        """Send what its sequence has got and the request was not told yet, so many tokens;
        `logprobs` are those of the newest."""
        request = self._requests.get(request_id)
        if request is None:
            return 0
        output = request.seq.output
        first, end = request.num_told, len(output)
        for index in range(first, end):
            request.num_told = index + 1
            newest = request.num_told == end
            self._send(request, Token(output[index], index, logprobs if newest else None))
        return end - first

    def finish(self, request_id: str, reason: FinishReason, message: str | None = None) -> None:
        """The last event of a request; unknown ids are those that were ended before."""
        with self._lock:
            request = self._requests.pop(request_id, None)
            self._cancelled.discard(request_id)
        if request is None:
            return
        self._observer.finished(reason)
        end = Finished(reason, message, len(request.seq.prompt), request.num_told)
        self._send(request, end)

    def _send(self, request: _Request, event: Event) -> None:
        try:
            request.sink(event)
        except Exception:
            # One listener's fault must not end the others' requests: it is cancelled instead.
            logger.exception(
                "a request's listener failed", extra={"request_id": request.seq.request_id}
            )
            self.cancel(request.seq.request_id)
