"""Tables of `explain`: layers and what they give up, experts and why they have their copies.

Neighbours: `moe_placement.explain` (the stories), `tables` (columns and colours).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moe_placement.command import tables
from moe_placement.explain import ExpertStory, LayerStory

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

MAX_COPIES = 5


def layers(stories: Sequence[LayerStory]) -> Table:
    rows = [
        [
            str(story.layer),
            f"{story.tokens:,.0f}",
            f"{story.fair:,.0f}",
            tables.percent(over(story.bound, story.fair)),
            tables.percent(over(story.largest, story.bound)),
            "–" if story.crossing is None else tables.percent(story.crossing, 1),
        ]
        for story in stories
    ]
    headings = ["layer", "tokens", "fair share", "bound over it", "fullest over bound", "crossing"]
    return tables.table(headings, rows, left=0)


def sentences(story: LayerStory) -> RenderableType:
    lines = [f"the bound: {line}" for line in story.limits]
    lines += [f"given up: {line}" for line in story.given_up]
    if not lines:
        lines = ["nothing is given up: the fullest rank carries its fair share"]
    return tables.text("\n".join(f"layer {story.layer}, {line}" for line in lines))


def experts(stories: Sequence[ExpertStory]) -> Table:
    rows = []
    for story in stories:
        served = [f"{copy.rank}:{copy.fraction:.0%}" for copy in story.copies[:MAX_COPIES]]
        more = len(story.copies) - MAX_COPIES
        rows.append(
            [
                str(story.expert),
                f"{story.tokens:,.0f}",
                f"{story.times_fair:.2f}",
                str(story.needed),
                str(len(story.copies)),
                " ".join(served) + (f" +{more}" if more > 0 else ""),
                _short(story),
            ]
        )
    headings = ["expert", "tokens", "÷ fair", "needs", "has", "rank: share", "why"]
    return tables.table(headings, rows, left=0, wrap=(5, 6))


def _short(story: ExpertStory) -> str:
    if not story.copies:
        return "lost"
    if story.needed > len(story.copies):
        return "needs more"
    if story.needed > 1:
        return "too hot for one"
    return "fits on one" if len(story.copies) == 1 else "fills up ranks"


def expert(story: ExpertStory) -> list[RenderableType]:
    several = len({copy.domain for copy in story.copies}) > 1 or bool(story.sent)
    copies = [
        [
            str(copy.rank), str(copy.slot), str(copy.domain) if several else "",
            tables.percent(copy.fraction, 1), f"{copy.tokens:,.0f}", copy.why,
        ]
        for copy in story.copies
    ]  # fmt: skip
    headings = ["rank", "slot", "domain" if several else "", "share", "tokens", "why this copy"]
    parts: list[RenderableType] = [
        tables.text(f"expert {story.expert}, {story.tokens:,.0f} tokens: {story.why}", "bold"),
        tables.table(headings, copies, left=0, wrap=(5,)),
    ]
    if story.sent:
        shown = story.copies[:MAX_COPIES]
        sent = [
            [
                str(sent.domain),
                f"{sent.tokens:,.0f}",
                *(tables.percent(share, 0) for share in sent.shares[: len(shown)]),
            ]
            for sent in story.sent
        ]
        ranks = [f"→ rank {copy.rank}" for copy in shown]
        parts.append(tables.table(["from domain", "tokens", *ranks], sent, left=0))
    return parts


def over(value: float, base: float) -> float:
    return value / base - 1 if base > 0 else 0.0
