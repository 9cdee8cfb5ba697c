"""Opening JSON, JSON lines and YAML: plain values out, every failure one line.

Neighbours: `arrays` (binary files), `load_files`, `trace_files`, `plan_files` (what it means).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from moe_placement.command.arrays import check_file
from moe_placement.command.usage import UsageError

JSON_SUFFIXES = (".json",)
LINES_SUFFIXES = (".jsonl", ".ndjson")
YAML_SUFFIXES = (".yaml", ".yml")
BROKEN_YAML = (yaml.YAMLError, ValueError, RecursionError)
"""What is raised for bad syntax, for 2020-99-99 or a number too long, and for deep nesting."""
MAX_VALUES = 100_000_000
SUFFIXES = JSON_SUFFIXES + LINES_SUFFIXES + YAML_SUFFIXES


def read_text(flag: str, path: Path) -> Any:
    """What a .json, .jsonl or .yaml file says; JSON lines become a list."""
    check_file(flag, path)
    try:
        text = path.read_text(encoding="utf-8-sig")  # with or without a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{flag}: can not read {path} as text: {error}") from error
    if path.suffix in YAML_SUFFIXES:
        try:
            document = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
            _values(document, {})
        except BROKEN_YAML as error:
            raise UsageError(f"{flag}: {path} is no YAML: {error}") from error
        return document
    try:
        if path.suffix in LINES_SUFFIXES:
            return [json.loads(line) for line in text.splitlines() if line.strip()]
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{flag}: {path} is no JSON: {error}") from error


def _values(part: Any, known: dict[int, int]) -> int:
    """Values in a part of a document, those that an alias repeats counted each time.

    Raises:
        ValueError: a part that holds itself, or far more values than were written down.
    """
    if not isinstance(part, list | dict):
        return 1
    if id(part) not in known:
        known[id(part)] = MAX_VALUES  # until it is counted: only a part of itself asks before
        inner = part if isinstance(part, list) else part.values()
        known[id(part)] = 1 + sum(_values(value, known) for value in inner)
    if known[id(part)] >= MAX_VALUES:
        raise ValueError("its aliases repeat it without end: write it out")
    return known[id(part)]
