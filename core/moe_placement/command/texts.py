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
SUFFIXES = JSON_SUFFIXES + LINES_SUFFIXES + YAML_SUFFIXES


def read_text(flag: str, path: Path) -> Any:
    """What a .json, .jsonl or .yaml file says; JSON lines become a list."""
    check_file(flag, path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{flag}: can not read {path} as text: {error}") from error
    if path.suffix in YAML_SUFFIXES:
        try:
            return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        except yaml.YAMLError as error:
            raise UsageError(f"{flag}: {path} is no YAML: {error}") from error
    try:
        if path.suffix in LINES_SUFFIXES:
            return [json.loads(line) for line in text.splitlines() if line.strip()]
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise UsageError(f"{flag}: {path} is no JSON: {error}") from error
