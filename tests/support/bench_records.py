"""Records of requests to a server that is not there."""

from __future__ import annotations

from moe_worker.bench.record import Outcome, Record, Tokens


def record(
    outcome: Outcome = Outcome.OK,
    *,
    due: float = 0.0,
    sent: float | None = 0.0,
    texts: tuple[float, ...] = (1.0,),
    end: float = 1.0,
    tokens: Tokens | None = None,
    retries: int = 0,
    detail: str = "",
) -> Record:
    """Times in seconds."""
    told = Tokens(None, None, None) if tokens is None else tokens
    return Record(outcome, due, sent, texts, end, told, retries, detail)
