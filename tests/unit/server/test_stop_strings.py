"""Stop strings are found across pieces, never leak, and hold back no more than they must."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_worker.text.stop_strings import StopStrings

TEXT = st.text("ab", max_size=30)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


def run(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    finder = StopStrings(stops)
    sent = ""
    for piece in pieces:
        sent += finder.push(piece)
        if finder.stopped:
            return sent, True
    return sent + finder.flush(), False


def naive(stops: list[str], text: str) -> tuple[str, bool]:
    """Grow the text by a character until it ends with a stop string; cut the longest."""
    for end in range(1, len(text) + 1):
        found = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(found)], True
    return text, False


@given(STOPS, st.lists(TEXT, max_size=6))
def test_equals_the_naive_search_however_the_text_is_cut(
    stops: list[str], pieces: list[str]
) -> None:
    assert run(stops, pieces) == naive(stops, "".join(pieces))


@given(STOPS, TEXT)
def test_nothing_of_a_stop_string_is_sent_before_it_is_decided(stops: list[str], text: str) -> None:
    finder = StopStrings(stops)
    sent = ""
    for character in text:
        sent += finder.push(character)
        assert naive(stops, text)[0].startswith(sent)
        if finder.stopped:
            break


@pytest.mark.parametrize(
    ("pieces", "sent"),
    [
        (["one ", "END", " two"], ["one ", ""]),
        (["one E", "N", "D"], ["one ", "", ""]),
        (["one EN", "ough"], ["one ", "ENough"]),
        (["EEN", "D"], ["E", ""]),
    ],
)
def test_only_a_possible_beginning_is_held_back(pieces: list[str], sent: list[str]) -> None:
    finder = StopStrings(["END"])
    given_out = []
    for piece in pieces:
        given_out.append(finder.push(piece))
        if finder.stopped:
            break
    assert given_out == sent


def test_without_stop_strings_text_passes() -> None:
    finder = StopStrings([])
    assert finder.push("anything") == "anything"
    assert finder.flush() == ""
