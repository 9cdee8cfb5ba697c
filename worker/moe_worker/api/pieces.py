"""From tokens to text that may be sent: the inner loop of both completion routes.

`generation` gives tokens, `detokenizer` makes characters of them, `stop_strings` decides where the
text ends; `choices` sends what comes out, in pieces or as a whole.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Literal

from moe_worker.api.api_error import cancelled, engine_failed
from moe_worker.api.generation import Generation
from moe_worker.engine.events import Finished, Prompt, Token, TokenLogprobs
from moe_worker.text.detokenizer import Decoder, Detokenizer
from moe_worker.text.stop_strings import StopStrings

EndReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class TextToken:
    """A token whose probability is told."""

    token_id: int
    offset: int
    """Where its text begins, in characters of the answer."""
    logprobs: TokenLogprobs | None
    """None for the first token of all: nothing comes before it."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that is final, and the tokens that begin in it; one of the two is not empty."""

    text: str
    tokens: tuple[TextToken, ...] = ()


@dataclass(frozen=True, slots=True)
class End:
    """The last item of a completion that ended well."""

    reason: EndReason
    completion_tokens: int
    """Tokens the text was made of, those of a stop string included."""


Item = Prompt | Piece | End


async def pieces(
    generation: Generation,
    detokenizer: Detokenizer,
    stops: StopStrings,
    on_token: Callable[[float], None],
    offset: int = 0,
) -> AsyncGenerator[Item, None]:
    """What is known of the prompt, the text of `generation` as it comes, then one End.

    `on_token` is told when the engine made each token (monotonic seconds); the text begins `offset`
    characters into the answer. The generation may still run when a stop string ended the text:
    whoever made it closes it.

    Raises:
        ApiError: the engine failed, or the request was cancelled by somebody else.
    """
    num_tokens = 0
    text = _Text(stops, offset)
    async with aclosing(generation.arrivals()) as arrivals:
        async for arrival in arrivals:
            match arrival.event:
                case Prompt() as prompt:
                    yield prompt
                case Token() as token:
                    num_tokens += 1
                    on_token(arrival.seconds)
                    text.note(token)
                    piece = text.push(detokenizer.push(token.token_id))
                    if piece is not None:
                        yield piece
                    if stops.stopped:
                        yield End("stop", num_tokens)
                        return
                case Finished() as finished:
                    reason = _end_reason(finished)
                    piece = text.end(detokenizer.flush())
                    if piece is not None:
                        yield piece
                    yield End("stop" if stops.stopped else reason, num_tokens)


def echoed(
    prompt_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] | None, decoder: Decoder
) -> Piece:
    """The prompt as the beginning of the answer; `logprobs` are those from the second token on,
    None when nobody asked."""
    if logprobs is None:
        return Piece(decoder.decode(list(prompt_ids), skip_special_tokens=True))
    detokenizer = Detokenizer(decoder)
    text, tokens = "", []
    for index, token_id in enumerate(prompt_ids):
        tokens.append(TextToken(token_id, len(text), logprobs[index - 1] if index else None))
        text += detokenizer.push(token_id)
    return Piece(text + detokenizer.flush(), tuple(tokens))


class _Text:
    """Text and tokens on their way out: a token goes with the first piece that reaches into it."""

    def __init__(self, stops: StopStrings, offset: int) -> None:
        self._stops = stops
        self._num_decoded = self._num_sent = offset
        self._tokens: deque[TextToken] = deque()

    def note(self, token: Token) -> None:
        """A token whose text comes next."""
        if token.logprobs is not None:
            self._tokens.append(TextToken(token.token_id, self._num_decoded, token.logprobs))

    def push(self, decoded: str) -> Piece | None:
        self._num_decoded += len(decoded)
        return self._piece(self._stops.push(decoded))

    def end(self, decoded: str) -> Piece | None:
        """The rest; tokens without text of their own go with it, unless a stop string cut it."""
        self._num_decoded += len(decoded)
        text = self._stops.push(decoded) + self._stops.flush()
        if self._stops.stopped:
            return self._piece(text)
        tokens = tuple(self._tokens)
        return Piece(text, tokens) if text or tokens else None

    def _piece(self, text: str) -> Piece | None:
        self._num_sent += len(text)
        tokens = []
        while self._tokens and self._tokens[0].offset < self._num_sent:
            tokens.append(self._tokens.popleft())
        return Piece(text, tuple(tokens)) if text else None


def _end_reason(finished: Finished) -> EndReason:
    match finished.reason:
        case "stop" | "length":
            return finished.reason
        case "cancelled":
            raise cancelled()
        case "error":
            raise engine_failed(finished.message)
