"""Statuses and Retry-After become outcomes."""

from __future__ import annotations

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_worker.bench.failure import MAX_DETAIL_CHARACTERS, broken, parse_retry_after, refused
from moe_worker.bench.record import Outcome

BODY = b'{"error": {"message": "The queue is full."}}'


@given(st.integers(100, 599).filter(lambda status: status != 200), st.binary(max_size=300))
def test_every_status_has_one_outcome_and_a_short_line(status: int, body: bytes) -> None:
    failure = refused(status, "3", body)
    expected = (
        Outcome.REFUSED if status == 429
        else Outcome.SERVER_ERROR if status >= 500
        else Outcome.CLIENT_ERROR
    )  # fmt: skip
    assert failure.outcome is expected
    assert (failure.retry_after_seconds == 3.0) == (status in (429, 503))
    assert failure.detail.startswith(str(status))
    assert len(failure.detail) <= MAX_DETAIL_CHARACTERS
    assert "\n" not in failure.detail


def test_the_servers_own_message_is_told() -> None:
    assert refused(429, None, BODY).detail == "429: The queue is full."
    assert refused(500, None, b"<html>\noops").detail == "500: <html> oops"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [(None, None), ("", None), ("2", 2.0), ("0", 0.0), ("1.5", 1.5), ("-1", None), ("nan", None),
     ("inf", None), ("Wed, 21 Oct 2026 07:28:00 GMT", None)],
)  # fmt: skip
def test_retry_after_in_seconds_counts(text: str | None, seconds: float | None) -> None:
    assert parse_retry_after(text) == seconds


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (httpx.ConnectError("refused"), Outcome.UNREACHABLE),
        (httpx.ReadError(""), Outcome.CUT_OFF),
        (httpx.RemoteProtocolError("peer closed"), Outcome.CUT_OFF),
        (httpx.DecodingError("gzip"), Outcome.MALFORMED),
    ],
)
def test_what_breaks_on_the_network_has_an_outcome(
    error: httpx.HTTPError, outcome: Outcome
) -> None:
    assert broken(error).outcome is outcome
    assert broken(error).detail
