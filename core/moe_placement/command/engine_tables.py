"""Placements as other engines write them: one row of expert ids per layer, consecutive slots per
rank.

| format | file | read by |
|---|---|---|
| trtllm | .yaml: `initial_global_assignments` {layer: row}, `num_slots` | TensorRT-LLM |
| physical-to-logical | .json: `physical_to_logical_map` [layers][slots] | SGLang; vLLM's table |

Neither knows shares or free slots: copies share evenly, every slot holds an expert. Neighbour:
`plan_files`.

Shapes: L MoE layers, R ranks, S slots a rank.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moe_api.plan import SlotsLRS
from moe_placement.command.usage import UsageError

ASSIGNMENTS = "initial_global_assignments"
MAP = "physical_to_logical_map"


def find_rows(flag: str, path: Path, document: Any) -> Any:
    """The rows in a document, one per layer in the order of the layers' numbers; None when it has
    none.

    Raises:
        UsageError: a layer that is no number.
    """
    if not isinstance(document, dict):
        return None
    if isinstance(document.get(ASSIGNMENTS), dict):
        assignments = document[ASSIGNMENTS]
        try:
            return [assignments[layer] for layer in sorted(assignments, key=int)]
        except (TypeError, ValueError, OverflowError) as error:
            raise UsageError(f"{flag}: {path}: a layer is no number: {error}") from error
    return document.get(MAP)


def to_slots(flag: str, path: Path, rows: Any, num_ranks: int | None) -> SlotsLRS:
    """Rows of expert ids as slots int32 [L, R, S].

    Raises:
        UsageError: rows of unequal length, or ranks that do not divide them.
    """
    if num_ranks is None:
        raise UsageError(f"--ranks is missing: {flag} {path} does not say how many ranks it is for")
    if not isinstance(rows, list) or not rows or not all(isinstance(row, list) for row in rows):
        raise UsageError(f"{flag}: {path}: expected a row of expert ids per layer")
    width = len(rows[0])
    for layer, row in enumerate(rows):
        if len(row) != width or not width or width % num_ranks:
            raise UsageError(
                f"{flag}: {path}: layer {layer} has {len(row)} slots: expected {width}, "
                f"a multiple of --ranks {num_ranks}"
            )
        for slot, expert in enumerate(row):
            if type(expert) is not int or not -1 <= expert < 2**31:
                raise UsageError(
                    f"{flag}: {path}: layer {layer}, slot {slot} is {reprlib.repr(expert)}: "
                    "must be an expert"
                )
    return np.array(rows, dtype=np.int32).reshape(len(rows), num_ranks, -1)


def trtllm(slots_LRS: SlotsLRS, layers: Sequence[int]) -> dict[str, Any]:
    """The balancer configuration of TensorRT-LLM, without updates while serving."""
    rows = _rows(slots_LRS)
    return {
        ASSIGNMENTS: dict(zip(layers, rows, strict=True)),
        "num_slots": len(rows[0]),
        "layer_updates_per_iter": 0,
    }


def physical_to_logical(slots_LRS: SlotsLRS) -> dict[str, Any]:
    return {MAP: _rows(slots_LRS)}


def _rows(slots_LRS: SlotsLRS) -> list[list[int]]:
    free = np.argwhere(slots_LRS < 0)
    if len(free):
        layer, rank, slot = free[0].tolist()
        raise UsageError(
            f"--to: layer {layer}, rank {rank}, slot {slot} is free, which this format can not "
            "say: plan with slots that all get an expert, or write npz or group-plan"
        )
    return [row.ravel().tolist() for row in slots_LRS]
