"""Decisions in status: newest first, a repeated one only counts up, a known one is completed.

Pure. Neighbours: `rebalance` makes the records, `status` keeps the list from one pass to the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from moe_api.status import MAX_DECISIONS, Decision


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
        return [new, *known]
    if new.verdict == "Aborted":
        told = any((d.group, d.message) == (new.group, new.message) for d in known)
        return known if told else [new, *known]
    for index, old in enumerate(known):
        if old.group != new.group:
            continue
        if (old.verdict, old.reason) == (new.verdict, new.reason):
            again = old.model_copy(update={"count": old.count + 1, "since": new.time})
            return [*known[:index], again, *known[index + 1 :]]
        break
    return [new, *known]
