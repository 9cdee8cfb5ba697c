"""Texts that fit where the API server takes them."""

from __future__ import annotations

from typing import overload

MAX_LINE = 1024


@overload
def cut(text: str, limit: int = MAX_LINE) -> str: ...
@overload
def cut(text: None, limit: int = MAX_LINE) -> None: ...
def cut(text: str | None, limit: int = MAX_LINE) -> str | None:
    """At most `limit` characters, the last one telling that more was there."""
    if text is None or len(text) <= limit:
        return text
    return f"{text[: limit - 1]}…"
