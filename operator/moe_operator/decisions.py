"""Decisions in status: newest first, a repeated one only counts up, a known one is completed.

Every interval decides, and mostly the same again: that is told now and then (`Repeats`), or an idle
deployment would be written for ever. Neighbours: `rebalance` makes the records, `status` keeps the
list from one pass to the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from moe_api.status import MAX_DECISIONS, Decision

REPEAT_SECONDS = 60.0
"""A decision that is only decided again is written this often."""


class Repeats:
    """Counts what is decided again between two writes. Losing it loses counts, no decision."""

    def __init__(self) -> None:
        self._told_seconds: dict[str, float] = {}
        self._untold: dict[str, int] = {}

    def due(
        self, known: Sequence[Decision], new: Iterable[Decision], now_seconds: float
    ) -> list[Decision]:
        """Those of `new` to be told now, each with the count of all it stands for."""
        out = []
        for decision in new:
            if decision in known:  # a rebalance of which nothing new is known
                continue
            group = decision.group
            told = self._told_seconds.setdefault(group, now_seconds)
            if _repeats(known, decision) and now_seconds - told < REPEAT_SECONDS:
                self._untold[group] = self._untold.get(group, 0) + decision.count
                continue
            untold = self._untold.pop(group, 0) if _repeats(known, decision) else 0
            self._told_seconds[group] = now_seconds
            out.append(decision.model_copy(update={"count": decision.count + untold}))
        return out


def recorded(known: Sequence[Decision], new: Iterable[Decision]) -> list[Decision]:
    """`known` with `new` put in; at most MAX_DECISIONS, the oldest fall out."""
    out = list(known)
    for decision in new:
        out = _put(out, decision)
    return out[:MAX_DECISIONS]


def _put(known: list[Decision], new: Decision) -> list[Decision]:
    if new.verdict == "Applied":
        for index, old in enumerate(known):
            if (old.group, old.verdict, old.time) == (new.group, new.verdict, new.time):
                return [*known[:index], new, *known[index + 1 :]]
        fell_out = len(known) >= MAX_DECISIONS and new.time < known[-1].time
        return known if fell_out else [new, *known]
    if new.verdict == "Aborted":
        told = any((d.group, d.message) == (new.group, new.message) for d in known)
        return known if told else [new, *known]
    if _repeats(known, new):
        index = next(i for i, old in enumerate(known) if old.group == new.group)
        count = known[index].count + new.count
        again = known[index].model_copy(update={"count": count, "since": new.time})
        return [*known[:index], again, *known[index + 1 :]]
    return [new, *known]


def _repeats(known: Sequence[Decision], new: Decision) -> bool:
    """The newest decision about the group had this verdict and reason, and nothing came of it."""
    if new.verdict in ("Applied", "Aborted"):
        return False
    newest = next((old for old in known if old.group == new.group), None)
    return newest is not None and (newest.verdict, newest.reason) == (new.verdict, new.reason)
