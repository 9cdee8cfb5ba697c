"""A worker's file may be written by hand: a number that means nothing is refused by its field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from moe_api.document import DocumentError
from moe_api.worker import WorkerConfig

MODEL = {"path": "/m", "servedName": "m"}


@pytest.mark.parametrize(
    ("block", "field", "value"),
    [
        ("model", "maxModelLen", 0), ("kv", "blocks", 0), ("kv", "blocks", -3),
        ("kv", "memoryFraction", 1.5), ("scheduler", "maxRunning", 0),
        ("scheduler", "maxBatchedTokens", -1), ("scheduler", "maxQueued", -1),
        ("api", "maxBodyBytes", 0), ("api", "maxStopStrings", -1), ("api", "maxChoices", 0),
    ],
)  # fmt: skip
def test_a_number_out_of_range_is_refused_by_name(block: str, field: str, value: Any) -> None:
    content: dict[str, Any] = {"schema": 1, "model": MODEL}
    content[block] = {**content.get(block, {}), field: value}
    with pytest.raises(DocumentError, match=f"{block}.{field}"):
        WorkerConfig.from_json(json.dumps(content).encode())


@pytest.mark.parametrize(("field", "value"), [("drainSeconds", -1), ("operationTimeoutSeconds", 0)])
def test_a_time_out_of_range_is_refused_by_name(field: str, value: Any) -> None:
    content = {"schema": 1, "model": MODEL, field: value}
    with pytest.raises(DocumentError, match=field):
        WorkerConfig.from_json(json.dumps(content).encode())
