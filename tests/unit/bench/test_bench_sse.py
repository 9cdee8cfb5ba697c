"""Events come out the same however the bytes were cut."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_worker.bench import sse
from moe_worker.bench.sse import EventParser, NotEvents

LINE_ENDS = st.sampled_from(["\n", "\r\n", "\r"])
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), max_size=12)
NOISE = st.sampled_from([": a comment", "event: x", "id: 1", "retry: 5", "data", "unknown"])


def parsed(pieces: list[bytes]) -> list[str]:
    parser = EventParser()
    return [event for piece in pieces for event in parser.push(piece)]


def cut(stream: bytes, places: list[int]) -> list[bytes]:
    borders = [0, *sorted(place % (len(stream) + 1) for place in places), len(stream)]
    return [stream[a:b] for a, b in itertools.pairwise(borders)]


@given(
    st.lists(st.lists(TEXTS, min_size=1, max_size=3), max_size=6),
    LINE_ENDS,
    st.lists(st.integers(0, 10_000), max_size=12),
)
def test_any_cut_gives_the_events_that_were_sent(
    events: list[list[str]], end: str, places: list[int]
) -> None:
    stream = "".join(
        "".join(f"data: {line}{end}" for line in event) + end for event in events
    ).encode()
    assert parsed(cut(stream, places)) == ["\n".join(event) for event in events]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_no_single_cut_changes_an_event_of_two_lines(end: str) -> None:
    stream = end.join(["data: é", "data: b", "", "data: c", "", ""]).encode()
    for place in range(len(stream) + 1):
        assert parsed([stream[:place], b"", stream[place:]]) == ["é\nb", "c"]
    assert parsed([bytes([byte]) for byte in stream]) == ["é\nb", "c"]


@given(st.lists(NOISE, max_size=4), TEXTS)
def test_what_is_no_data_is_skipped(noise: list[str], text: str) -> None:
    noise = [line for line in noise if line != "data"]
    stream = "\n".join([*noise, f"data:{text}", *noise, "", ""])
    assert parsed([stream.encode()]) == [text.removeprefix(" ")]


@given(st.binary(max_size=200), st.lists(st.integers(0, 10_000), max_size=8))
def test_any_bytes_give_the_same_however_they_are_cut(stream: bytes, places: list[int]) -> None:
    def outcome(pieces: list[bytes]) -> tuple[list[str], bool]:
        parser, found = EventParser(), []
        try:
            for piece in pieces:
                found += parser.push(piece)
        except NotEvents:
            return [], True
        return found, False

    assert outcome(cut(stream, places)) == outcome([stream])


def test_an_event_that_is_not_finished_is_none() -> None:
    assert parsed([b"data: whole\n\ndata: hal", b"f\n"]) == ["whole"]


def test_events_beyond_the_bound_and_broken_text_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 100)
    with pytest.raises(NotEvents, match="larger than 100 bytes"):
        parsed([b"data: " + b"x" * 50, b"x" * 50])
    with pytest.raises(NotEvents, match="larger than 100 bytes"):
        parsed([b"data: 12345678901234567890\n"] * 5)
    with pytest.raises(NotEvents, match="not UTF-8"):
        parsed([b"data: \xff\n\n"])
