"""From tokens to text that may be sent: the inner loop of both completion routes.

`generation` gives tokens, `detokenizer` makes characters of them, `stop_strings` decides where the
text ends; `server` sends what comes out, in pieces or as a whole.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Literal

from moe_worker.api.api_error import cancelled, engine_failed
from moe_worker.api.generation import Generation
from moe_worker.engine.events import Finished, Token
from moe_worker.text.detokenizer import Detokenizer
from moe_worker.text.stop_strings import StopStrings

EndReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that is final; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class End:
    """The last item of a completion that ended well."""

    reason: EndReason
    completion_tokens: int
    """Tokens the text was made of, those of a stop string included."""


async def pieces(
    generation: Generation,
    detokenizer: Detokenizer,
    stops: StopStrings,
    on_token: Callable[[float], None],
) -> AsyncGenerator[Piece | End, None]:
    """The text of `generation` as it comes, then one End.

    `on_token` is told when the engine made each token (monotonic seconds). The generation may still
    run when a stop string ended the text: whoever made it closes it.

    Raises:
        ApiError: the engine failed, or the request was cancelled by somebody else.
    """
    num_tokens = 0
    async with aclosing(generation.arrivals()) as arrivals:
        async for arrival in arrivals:
            match arrival.event:
                case Token(token_id=token_id):
                    num_tokens += 1
                    on_token(arrival.seconds)
                    text = stops.push(detokenizer.push(token_id))
                    if text:
                        yield Piece(text)
                    if stops.stopped:
                        yield End("stop", num_tokens)
                        return
                case Finished() as finished:
                    reason = _end_reason(finished)
                    text = stops.push(detokenizer.flush()) + stops.flush()
                    if text:
                        yield Piece(text)
                    yield End("stop" if stops.stopped else reason, num_tokens)


def _end_reason(finished: Finished) -> EndReason:
    match finished.reason:
        case "stop" | "length":
            return finished.reason
        case "cancelled":
            raise cancelled()
        case "error":
            raise engine_failed(finished.message)
