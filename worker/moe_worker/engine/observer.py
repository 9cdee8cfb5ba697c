"""Where the engine reports what it did; `moe_worker.metrics` listens, tests listen with their own.

Calls come from the engine thread (migration bytes from the staging thread, `loaded` from the one
that prepares), must be quick and must
not raise. What can be read at any time (load, KV use, requests) is not reported but asked for.
"""

from __future__ import annotations

from typing import Literal, Protocol

from moe_worker.engine.events import FinishReason

StepPhase = Literal["schedule", "agree", "run", "publish"]
ExchangePhase = Literal["agree", "dispatch", "combine"]
Scope = Literal["self", "domain", "remote"]


class Observer(Protocol):
    def loaded(self, read_bytes: int, peak_bytes: int) -> None:
        """Weights for a generation are complete: bytes of the checkpoint read until now, and the
        most memory that the process has had."""

    def warmed_up(self, seconds: float) -> None:
        """All kernels that the model needs are compiled or loaded, which took so long."""

    def step(self, phase: StepPhase, seconds: float) -> None:
        """One phase of a busy step; steps in which the whole group was idle are not reported."""

    def exchange(self, phase: ExchangePhase, seconds: float) -> None:
        """Waiting for one exchange of a busy step."""

    def sent(self, scope: Scope, num_bytes: int) -> None:
        """Bytes handed to a member; `self` = rows that stayed on this rank."""

    def migrated(self, num_bytes: int) -> None:
        """Expert weights that arrived here and were verified."""

    def switched(self, epoch: int, stall_seconds: float | None) -> None:
        """Another placement is in force; no stall when no requests were running at the switch."""

    def admitted(self, prompt_tokens: int) -> None: ...

    def prompt_computed(self, num_tokens: int, num_cached_tokens: int) -> None:
        """A request's prompt is computed, but for what the prefix cache held of it; once each."""

    def generated(self, num_tokens: int) -> None: ...

    def finished(self, reason: FinishReason) -> None: ...


class Unobserved:
    """Listens to nothing."""

    def loaded(self, read_bytes: int, peak_bytes: int) -> None: ...
    def warmed_up(self, seconds: float) -> None: ...
    def step(self, phase: StepPhase, seconds: float) -> None: ...
    def exchange(self, phase: ExchangePhase, seconds: float) -> None: ...
    def sent(self, scope: Scope, num_bytes: int) -> None: ...
    def migrated(self, num_bytes: int) -> None: ...
    def switched(self, epoch: int, stall_seconds: float | None) -> None: ...
    def admitted(self, prompt_tokens: int) -> None: ...
    def prompt_computed(self, num_tokens: int, num_cached_tokens: int) -> None: ...
    def generated(self, num_tokens: int) -> None: ...
    def finished(self, reason: FinishReason) -> None: ...
