"""Text and tokens on their way out: no token is lost or told twice, whatever stops the text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_worker.api.api_error import ApiError
from moe_worker.api.choices import merged
from moe_worker.api.generation import Arrival
from moe_worker.api.pieces import End, Item, Piece, echoed, pieces
from moe_worker.engine.events import Event, Finished, Prompt, Token, TokenLogprobs
from moe_worker.text.detokenizer import Detokenizer
from moe_worker.text.stop_strings import StopStrings
from tests.support.byte_tokenizer import byte_tokenizer

TOKENIZER = byte_tokenizer()


class Scripted:
    """In the place of a Generation."""

    def __init__(self, events: list[Event]) -> None:
        self._events = events

    async def arrivals(self) -> AsyncGenerator[Arrival, None]:
        for event in self._events:
            yield Arrival(event, 0.0)


def events(ids: list[int], reason: str = "length", logprobs: bool = True) -> list[Event]:
    told = [TokenLogprobs(token, -1.0) if logprobs else None for token in ids]
    tokens = [Token(token, i, told[i]) for i, token in enumerate(ids)]
    end = Finished(reason, None, 3, len(ids))  # type: ignore[arg-type]
    return [Prompt(2), *tokens, end]


def read(sent: list[Event], stops: tuple[str, ...] = ()) -> list[Item]:
    async def all_items() -> list[Item]:
        source = pieces(
            Scripted(sent),  # type: ignore[arg-type]
            Detokenizer(TOKENIZER),
            StopStrings(stops),
            lambda seconds: None,
        )
        return [item async for item in source]

    return asyncio.run(all_items())


def text_of(items: list[Item]) -> str:
    return "".join(item.text for item in items if isinstance(item, Piece))


def tokens_of(items: list[Item]) -> list[tuple[int, int]]:
    return [
        (token.token_id, token.offset)
        for item in items
        if isinstance(item, Piece)
        for token in item.tokens
    ]


TEXTS = st.text("aäb😀.\n", max_size=12)


@given(TEXTS, st.lists(st.text("aä.", min_size=1, max_size=3), max_size=2))
def test_every_token_that_begins_in_the_text_is_told_once(text: str, stops: list[str]) -> None:
    ids = TOKENIZER.encode(text).ids
    items = read(events(ids), tuple(stops))
    sent = text_of(items)
    assert text.startswith(sent)
    assert items[0] == Prompt(2)
    assert isinstance(items[-1], End)
    told = tokens_of(items)
    stopped = any(stop in text for stop in stops)
    assert items[-1].reason == ("stop" if stopped else "length")
    if not stopped:
        assert sent == text
        assert [token for token, _ in told] == ids
    assert told == [pair for pair in told if pair[1] < max(1, len(sent))]
    offsets = [offset for _, offset in told]
    assert offsets == sorted(offsets)
    assert [token for token, _ in told] == ids[: len(told)]


def test_tokens_of_half_a_character_go_with_the_whole() -> None:
    items = read(events([97, 0xC3, 0xA4]))
    assert [item for item in items if isinstance(item, Piece)][1].text == "ä"
    assert tokens_of(items) == [(97, 0), (0xC3, 1), (0xA4, 1)]


def test_a_stop_string_takes_its_tokens_with_it() -> None:
    items = read(events(TOKENIZER.encode("abcdef").ids), ("de",))
    assert text_of(items) == "abc"
    assert [offset for _, offset in tokens_of(items)] == [0, 1, 2]


def test_without_asking_no_tokens_are_told() -> None:
    assert tokens_of(read(events([97, 98], logprobs=False))) == []


@pytest.mark.parametrize(("reason", "status"), [("cancelled", 409), ("error", 500)])
def test_ends_that_are_errors(reason: str, status: int) -> None:
    with pytest.raises(ApiError) as caught:
        read(events([97], reason))
    assert caught.value.status == status


def test_an_echo_tells_the_prompt_from_its_second_token_on() -> None:
    ids = TOKENIZER.encode("aä").ids
    told = [TokenLogprobs(token, -2.0) for token in ids[1:]]
    piece = echoed(ids, told, TOKENIZER)
    assert piece.text == "aä"
    assert [(token.token_id, token.offset) for token in piece.tokens] == [
        (ids[0], 0),
        (ids[1], 1),
        (ids[2], 1),
    ]
    assert [token.logprobs for token in piece.tokens] == [None, *told]
    assert echoed(ids, None, TOKENIZER) == Piece("aä")


@given(st.lists(st.lists(st.integers(), max_size=4), min_size=1, max_size=4))
def test_merged_sources_keep_their_own_order(sources: list[list[int]]) -> None:
    async def items_of(values: list[int]) -> AsyncGenerator[int, None]:
        for value in values:
            await asyncio.sleep(0)
            yield value

    async def all_items() -> list[tuple[int, int]]:
        return [pair async for pair in merged([items_of(values) for values in sources])]

    pairs = asyncio.run(all_items())
    for index, values in enumerate(sources):
        assert [value for source, value in pairs if source == index] == values


def test_the_first_error_ends_all_sources() -> None:
    closed = []

    async def endless() -> AsyncGenerator[int, None]:
        try:
            while True:
                await asyncio.sleep(0)
                yield 1
        finally:
            closed.append(True)

    async def failing() -> AsyncGenerator[int, None]:
        yield 2
        raise RuntimeError("broken")

    async def read_all() -> None:
        async for _ in merged([endless(), failing()]):
            pass

    with pytest.raises(RuntimeError, match="broken"):
        asyncio.run(read_all())
    assert closed == [True]
