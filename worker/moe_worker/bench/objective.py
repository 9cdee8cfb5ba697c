"""Which answers were fast enough: service level objectives, and what goodput counts."""

from __future__ import annotations

from dataclasses import dataclass

from moe_worker.bench.record import Record


@dataclass(frozen=True)
class Objective:
    """None = any time will do."""

    ttft_seconds: float | None = None
    itl_seconds: float | None = None

    def __bool__(self) -> bool:
        return self.ttft_seconds is not None or self.itl_seconds is not None

    def met_by(self, record: Record) -> bool:
        """Answered, its first text in time (of an empty answer: its end), and no slower per token
        on average than asked."""
        if not record.is_ok:
            return False
        first = record.first_text_seconds
        first = record.whole_seconds if first is None else first
        if self.ttft_seconds is not None and first > self.ttft_seconds:
            return False
        per_token = record.per_token_seconds or 0.0
        return self.itl_seconds is None or per_token <= self.itl_seconds
