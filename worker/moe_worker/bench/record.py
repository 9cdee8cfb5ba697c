"""What became of one request: how it ended, when its parts came, how many tokens it had.

`client` makes records, `measurement` adds them up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise


class Outcome(StrEnum):
    OK = "ok"
    REFUSED = "refused"
    SERVER_ERROR = "server_error"
    CLIENT_ERROR = "client_error"
    CUT_OFF = "cut_off"
    MALFORMED = "malformed"
    TIMED_OUT = "timed_out"
    UNREACHABLE = "unreachable"


MEANINGS = {
    Outcome.OK: "answered to the end",
    Outcome.REFUSED: "429, too many requests",
    Outcome.SERVER_ERROR: "5xx, or an error inside the stream",
    Outcome.CLIENT_ERROR: "any other status than 200",
    Outcome.CUT_OFF: "the connection broke before the end",
    Outcome.MALFORMED: "200, but no stream of completions",
    Outcome.TIMED_OUT: "no end within the timeout",
    Outcome.UNREACHABLE: "no connection",
}


@dataclass(frozen=True)
class Tokens:
    """As the server's usage tells them; None = it did not."""

    input: int | None
    output: int | None
    cached: int | None


@dataclass(frozen=True)
class Record:
    """Times are seconds of one monotonic clock."""

    outcome: Outcome
    due_seconds: float
    """When the user wanted it sent: every latency counts from here."""
    sent_seconds: float | None
    """None = its time was over before a connection was free."""
    text_seconds: Sequence[float]
    """When each piece of text came."""
    end_seconds: float
    tokens: Tokens
    retries: int = 0
    """Times it was refused, waited as long as the server asked, and was sent again."""
    detail: str = ""
    """What went wrong, for people."""

    @property
    def is_ok(self) -> bool:
        return self.outcome is Outcome.OK

    @property
    def waited_seconds(self) -> float | None:
        """For a free connection."""
        return None if self.sent_seconds is None else self.sent_seconds - self.due_seconds

    @property
    def first_text_seconds(self) -> float | None:
        """After it was due (TTFT); None = no text came."""
        return self.text_seconds[0] - self.due_seconds if self.text_seconds else None

    @property
    def whole_seconds(self) -> float:
        return self.end_seconds - self.due_seconds

    @property
    def output_tokens(self) -> int:
        """Pieces of text stand for tokens where usage is missing."""
        return len(self.text_seconds) if self.tokens.output is None else self.tokens.output

    @property
    def gaps_seconds(self) -> list[float]:
        """Between one piece of text and the next (ITL)."""
        times = self.text_seconds
        return [later - earlier for earlier, later in pairwise(times)]

    @property
    def per_token_seconds(self) -> float | None:
        """Mean over the tokens after the first (TPOT); None = there are none."""
        if len(self.text_seconds) < 2 or self.output_tokens < 2:
            return None
        return (self.text_seconds[-1] - self.text_seconds[0]) / (self.output_tokens - 1)
