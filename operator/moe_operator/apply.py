"""Keep a child as it should be without reading it each time: apply on change and now and then.

Server-side apply of the same content changes nothing, so a child that somebody removed or edited is
put right within REPEAT_SECONDS, and at once after a restart. Neighbours: `children`, `reconcile`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from moe_operator.context import Context, Key

REPEAT_SECONDS = 30.0
ABSENT = ""


@dataclass(frozen=True)
class Applied:
    content: str
    """The manifest as text; ABSENT when the child was removed."""
    at_seconds: float


def apply_child(ctx: Context, key: Key, manifest: dict[str, Any]) -> None:
    """Apply `manifest` unless the same was applied lately."""
    name = (manifest["kind"], manifest["metadata"]["name"])
    content = json.dumps(manifest, sort_keys=True)
    if _due(ctx, key, name, content):
        ctx.cluster.apply(manifest)
        _note(ctx, key, name, content)


def remove_child(ctx: Context, key: Key, kind: str, name: str) -> None:
    """Delete the child if it is there, unless that was checked lately."""
    if not _due(ctx, key, (kind, name), ABSENT):
        return
    found = ctx.cluster.get(kind, key.namespace, name)
    if found is not None:
        ctx.cluster.delete(kind, key.namespace, name, found["metadata"]["uid"])
    _note(ctx, key, (kind, name), ABSENT)


def _due(ctx: Context, key: Key, name: tuple[str, str], content: str) -> bool:
    last = _notes(ctx, key).get(name)
    now = ctx.clock.monotonic()
    return last is None or last.content != content or now - last.at_seconds >= REPEAT_SECONDS


def _note(ctx: Context, key: Key, name: tuple[str, str], content: str) -> None:
    _notes(ctx, key)[name] = Applied(content, ctx.clock.monotonic())


def _notes(ctx: Context, key: Key) -> dict[tuple[str, str], Applied]:
    notes: dict[tuple[str, str], Applied] = ctx.memory.of(key, "applied", dict)
    return notes
