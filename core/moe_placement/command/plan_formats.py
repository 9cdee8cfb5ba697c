"""Plans into files, in the format that the suffix or `--to` names.

| format | suffix | content |
|---|---|---|
| npz | .npz | `slots` int32 and `fractions` float64, both [layers, ranks, slots] |
| group-plan | .json .yaml | the operator's and the workers' document |
| trtllm | .yaml | another engine's table (`engine_tables`) |
| physical-to-logical | .json | another engine's table (`engine_tables`) |

Neighbours: `plan_files` reads them back, `outputs` writes bytes.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from moe_api.plan import GroupPlan, LayerPlacement, Member, encode_layers
from moe_placement.command import engine_tables, outputs
from moe_placement.command.usage import UsageError
from moe_placement.placement import Placement

MAX_MEMBERS = 1024
"""Of a GroupPlan."""


class Format(StrEnum):
    NPZ = "npz"
    GROUP_PLAN = "group-plan"
    TRTLLM = "trtllm"
    PHYSICAL_TO_LOGICAL = "physical-to-logical"


SUFFIXES: dict[Format, tuple[str, ...]] = {
    Format.NPZ: (".npz",),
    Format.GROUP_PLAN: (".json", ".yaml", ".yml"),
    Format.TRTLLM: (".yaml", ".yml"),
    Format.PHYSICAL_TO_LOGICAL: (".json",),
}
PLAN_SUFFIXES = (*SUFFIXES[Format.NPZ], *SUFFIXES[Format.GROUP_PLAN])
"""Of formats that say all of a plan."""
KEEPS_FRACTIONS = (Format.NPZ, Format.GROUP_PLAN)


def by_suffix(path: Path) -> Format:
    """The format of a file when nothing else is said."""
    return Format.NPZ if path.suffix == ".npz" else Format.GROUP_PLAN


def write(flag: str, path: Path, placement: Placement, around: GroupPlan | None = None) -> None:
    """Write a plan in the format that its suffix names."""
    outputs.write(flag, path, encode(placement, path, by_suffix(path), around))


def encode(
    placement: Placement,
    path: Path,
    to: Format,
    around: GroupPlan | None = None,
    layers: Sequence[int] | None = None,
) -> bytes:
    """Content of a file at `path`.

    Args:
        around: what a group plan says beside its layers; None = members by rank, to be edited.
        layers: numbers of the layers in the model; None = those of `around`, else from 0.

    Raises:
        UsageError: the format can not say what the plan says.
    """
    num_layers = len(placement.slots_LRS)
    if layers is None and around is not None and len(around.layers) == num_layers:
        layers = [layer.layer for layer in around.layers]
    if layers is None:
        layers = range(num_layers)
    if to is Format.NPZ:
        file = io.BytesIO()
        np.savez(file, slots=placement.slots_LRS, fractions=placement.fractions_LRS)
        return file.getvalue()
    if to is Format.GROUP_PLAN:
        return _text(path, _group_plan(placement, around, layers).to_wire())
    if to is Format.TRTLLM:
        return _text(path, engine_tables.trtllm(placement.slots_LRS, list(layers)))
    return _text(path, engine_tables.physical_to_logical(placement.slots_LRS))


def _group_plan(placement: Placement, around: GroupPlan | None, layers: Sequence[int]) -> GroupPlan:
    num_ranks = placement.slots_LRS.shape[1]
    wire = [
        layer.model_copy(update={"layer": number})
        for layer, number in zip(
            encode_layers(placement.slots_LRS, placement.fractions_LRS), layers, strict=True
        )
    ]
    if around is None:
        around = _by_rank(num_ranks, wire)
    if len(around.members) != num_ranks:
        raise UsageError(f"--like: a plan of {len(around.members)} members for {num_ranks} ranks")
    return around.model_copy(update={"layers": wire}).sealed()


def _by_rank(num_ranks: int, layers: list[LayerPlacement]) -> GroupPlan:
    """A plan for members that are called by their rank."""
    if num_ranks > MAX_MEMBERS:
        raise UsageError(
            f"--to: a group plan has at most {MAX_MEMBERS} ranks, this one {num_ranks}"
        )
    members = [
        Member(id=rank, pod=f"rank-{rank}", uid="", address=f"rank-{rank}", incarnation="")
        for rank in range(num_ranks)
    ]
    return GroupPlan(
        namespace="default", deployment="local", group=0, leader_epoch=1, generation=1, epoch=1,
        members=members, layers=layers,
    )  # fmt: skip


def _text(path: Path, document: dict[str, Any]) -> bytes:
    if path.suffix == ".json":
        return f"{json.dumps(document, allow_nan=False)}\n".encode()
    return yaml.safe_dump(document, sort_keys=False, default_flow_style=None).encode()
