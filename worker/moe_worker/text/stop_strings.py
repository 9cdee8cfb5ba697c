"""Finds stop strings in text that arrives in pieces, and never lets a part of one slip out.

Neighbours: `api.pieces` feeds it what `detokenizer` gives. One automaton per stop string
(Knuth, Morris, Pratt 1977), so a character costs the same however long the text that is held back.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Cuts a text before the first stop string that is completed.

    When several are completed by the same character, the longest (which begins first) counts. The
    result does not depend on how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._automata = [_Automaton(stop) for stop in stops]
        self._held = ""
        self.stopped = False

    def push(self, piece: str) -> str:
        """Text that is safe to send; what may still become a stop string is held back."""
        assert not self.stopped
        if not self._automata:
            return piece
        text = self._held + piece
        for index in range(len(self._held), len(text)):
            completed = [a.length for a in self._automata if a.step(text[index])]
            if completed:
                self.stopped = True
                self._held = ""
                return text[: index + 1 - max(completed)]
        keep = max(automaton.matched for automaton in self._automata)
        cut = len(text) - keep
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """The held text, once no more will come: it was no stop string after all."""
        held, self._held = self._held, ""
        return held


class _Automaton:
    """How much of one stop string the end of the text so far matches."""

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self._fallback = _fallbacks(stop)
        self.length = len(stop)
        self.matched = 0

    def step(self, character: str) -> bool:
        """Take one more character; True when it completes the stop string."""
        while self.matched and self._stop[self.matched] != character:
            self.matched = self._fallback[self.matched - 1]
        if self._stop[self.matched] == character:
            self.matched += 1
        return self.matched == self.length


def _fallbacks(stop: str) -> list[int]:
    """For each prefix of `stop`, length of its longest proper border."""
    fallback = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[index] != stop[length]:
            length = fallback[length - 1]
        if stop[index] == stop[length]:
            length += 1
        fallback[index] = length
    return fallback
