"""Plans from files.

| suffix | content |
|---|---|
| .npz | `slots` int [layers, ranks, slots], −1 = free; `fractions` float, absent = even |
| .npy | the slots alone |
| .json .yaml | a GroupPlan, or an ExpertPlacement as kubectl prints it |
| .json .yaml | another engine's table (`engine_tables`) |

A second copy of an expert on one rank, which other planners make, serves nothing more than the
first: the two become one. Neighbours: `arrays` and `texts` open the files,
`plan_formats` writes them.

Shapes: L MoE layers, R ranks, S physical slots a rank.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moe_api import names
from moe_api.document import DocumentError
from moe_api.plan import (
    FRACTION_UNITS,
    FractionsLRS,
    GroupPlan,
    PlanError,
    SlotsLRS,
)
from moe_placement.command import arrays, engine_tables, texts
from moe_placement.command.arrays import Array
from moe_placement.command.load_files import MAX_LAYERS
from moe_placement.command.token_routing import MAX_EXPERTS
from moe_placement.command.usage import UsageError
from moe_placement.placement import FRACTION_TOLERANCE, ExpertsL, Placement

SUFFIXES = ".npz, .npy, .json or .yaml"
DOCUMENT_TOLERANCE = 0.5 / FRACTION_UNITS
"""Documents carry shares as uint16."""


@dataclass(frozen=True, eq=False)
class PlanFile:
    placement: Placement
    document: GroupPlan | None = None
    """What a JSON or YAML file said around the placement."""
    twins: int = 0
    """Second copies on a rank that holds the expert already; they are dropped."""

    @property
    def num_layers(self) -> int:
        return len(self.placement.slots_LRS)

    @property
    def num_ranks(self) -> int:
        return int(self.placement.slots_LRS.shape[1])


def read_plan(
    flag: str, path: Path, num_ranks: int | None = None, *, keep_twins: bool = False
) -> PlanFile:
    """The plan in a file of any format of this module.

    Args:
        num_ranks: for formats that do not say it; the others must agree with it.
        keep_twins: leave second copies on a rank where they are.

    Raises:
        UsageError: naming `flag`, the file and what is wrong with it.
    """
    document = None
    fractions: Array | None = None
    if path.suffix == ".npy":
        slots = arrays.read_npy(flag, path)
    elif path.suffix == ".npz":
        found = arrays.read_npz(flag, path)
        fractions = found.pop("fractions", None)
        slots = arrays.pick(flag, path, found, "slots")
    elif path.suffix in texts.SUFFIXES:
        value = texts.read_text(flag, path)
        rows = engine_tables.find_rows(flag, path, value)
        if rows is not None:
            slots = engine_tables.to_slots(flag, path, rows, num_ranks)
        else:
            document = _group_plan(flag, path, value)
            slots, fractions = _decoded(flag, path, document)
    else:
        raise UsageError(f"{flag}: {path} must end in {SUFFIXES}")
    placement = _checked(flag, path, slots, fractions, document is not None)
    twins = 0
    if not keep_twins:
        placement, twins = _without_twins(placement)
    plan = PlanFile(placement, document, twins)
    if num_ranks is not None and plan.num_ranks != num_ranks:
        raise UsageError(f"{flag}: {path} is for {plan.num_ranks} ranks, --ranks is {num_ranks}")
    return plan


def check_experts(flag: str, path: Path, plan: PlanFile, experts_L: ExpertsL) -> None:
    """Raise UsageError unless the plan speaks of the layers and experts that the load has."""
    slots_LRS = plan.placement.slots_LRS
    if len(slots_LRS) != len(experts_L):
        raise UsageError(
            f"{flag}: {path} has {len(slots_LRS)} layers, --load has {len(experts_L)}: "
            "give a load of the same model"
        )
    wrong = np.argwhere(slots_LRS >= experts_L[:, None, None])
    if len(wrong):
        layer, rank, slot = wrong[0].tolist()
        raise UsageError(
            f"{flag}: {path}: layer {layer}, rank {rank} holds expert "
            f"{slots_LRS[layer, rank, slot]}, --load has {experts_L[layer]} experts there"
        )


def _group_plan(flag: str, path: Path, value: Any) -> GroupPlan:
    if isinstance(value, dict) and isinstance(value.get("items"), list):
        if len(value["items"]) != 1:
            raise UsageError(
                f"{flag}: {path} lists {len(value['items'])} objects: give one, as of "
                "kubectl get expertplacement NAME -o yaml"
            )
        value = value["items"][0]
    if isinstance(value, dict) and value.get("kind") == names.PLACEMENT_KIND:
        value = value.get("spec")
    if not isinstance(value, dict) or "layers" not in value:
        raise UsageError(
            f"{flag}: {path} is no plan: expected a GroupPlan, an ExpertPlacement, "
            f"{engine_tables.ASSIGNMENTS} or {engine_tables.MAP}"
        )
    try:
        return GroupPlan.from_json(json.dumps(value))
    except (DocumentError, TypeError, ValueError) as error:
        raise UsageError(f"{flag}: {path}: {error}") from error


def _decoded(flag: str, path: Path, document: GroupPlan) -> tuple[SlotsLRS, FractionsLRS]:
    try:
        return document.slots(), document.fractions()
    except (PlanError, ValueError, OverflowError) as error:
        raise UsageError(f"{flag}: {path}: {error}") from error


def _checked(
    flag: str, path: Path, slots: Array, fractions: Array | None, rounded: bool
) -> Placement:
    if slots.ndim != 3 or not slots.size or slots.shape[0] > MAX_LAYERS:
        raise UsageError(
            f"{flag}: {path}: slots have shape {slots.shape}: expected [layers, ranks, slots], "
            f"at most {MAX_LAYERS} layers"
        )
    whole = arrays.whole_numbers(flag, f"{path}: slots", slots)
    wrong = np.argwhere((whole < -1) | (whole >= MAX_EXPERTS))
    if len(wrong):
        layer, rank, slot = wrong[0].tolist()
        raise UsageError(
            f"{flag}: {path}: layer {layer}, rank {rank}, slot {slot} is "
            f"{whole[layer, rank, slot]}: must be an expert, 0 to {MAX_EXPERTS - 1}, or -1 for a "
            "free slot"
        )
    slots_LRS = whole.astype(np.int32)
    if not (slots_LRS >= 0).any(axis=(1, 2)).all():
        layer = int(np.argmin((slots_LRS >= 0).any(axis=(1, 2))))
        raise UsageError(f"{flag}: {path}: layer {layer} holds no expert at all")
    if fractions is None:
        return Placement.even(slots_LRS)
    tolerance = DOCUMENT_TOLERANCE if rounded else FRACTION_TOLERANCE
    return Placement(slots_LRS, _checked_fractions(flag, path, slots_LRS, fractions, tolerance))


def _checked_fractions(
    flag: str, path: Path, slots_LRS: SlotsLRS, fractions: Array, tolerance: float
) -> FractionsLRS:
    if fractions.shape != slots_LRS.shape:
        raise UsageError(
            f"{flag}: {path}: fractions have shape {fractions.shape}, slots {slots_LRS.shape}: "
            "must be the same"
        )
    out = np.asarray(fractions, dtype=np.float64)
    wrong = np.argwhere(~np.isfinite(out) | (out < 0) | ((slots_LRS < 0) & (out != 0)))
    if len(wrong):
        layer, rank, slot = wrong[0].tolist()
        raise UsageError(
            f"{flag}: {path}: layer {layer}, rank {rank}, slot {slot} has fraction "
            f"{out[layer, rank, slot]:g}: must be 0 to 1, and 0 in a free slot"
        )
    sums_LE = np.zeros((len(slots_LRS), int(slots_LRS.max()) + 1))
    layer_N, rank_N, slot_N = np.nonzero(slots_LRS >= 0)
    expert_N = slots_LRS[layer_N, rank_N, slot_N]
    np.add.at(sums_LE, (layer_N, expert_N), out[layer_N, rank_N, slot_N])
    off_N = np.abs(sums_LE[layer_N, expert_N] - 1) > tolerance
    if off_N.any():
        layer, expert = int(layer_N[off_N][0]), int(expert_N[off_N][0])
        raise UsageError(
            f"{flag}: {path}: layer {layer}: fractions of expert {expert} sum to "
            f"{sums_LE[layer, expert]:.6f}: must be 1"
        )
    return out


def _without_twins(placement: Placement) -> tuple[Placement, int]:
    """Every later copy of an expert on the same rank joined to its first, and how many there
    were."""
    slots_LRS, fractions_LRS = placement.slots_LRS, placement.fractions_LRS
    order = np.argsort(slots_LRS, axis=2, kind="stable")
    ordered = np.take_along_axis(slots_LRS, order, 2)
    is_first = np.ones(ordered.shape, dtype=np.bool_)
    is_first[:, :, 1:] = ordered[:, :, 1:] != ordered[:, :, :-1]
    is_twin = ~is_first & (ordered >= 0)
    if not is_twin.any():
        return placement, 0
    group = np.maximum.accumulate(np.where(is_first, np.arange(ordered.shape[2]), 0), axis=2)
    first = np.take_along_axis(order, group, 2)
    slots, fractions = slots_LRS.copy(), fractions_LRS.copy()
    layer_N, rank_N, _ = np.nonzero(is_twin)
    twin_N, first_N = order[is_twin], first[is_twin]
    np.add.at(fractions, (layer_N, rank_N, first_N), fractions[layer_N, rank_N, twin_N])
    slots[layer_N, rank_N, twin_N] = -1
    fractions[layer_N, rank_N, twin_N] = 0.0
    return Placement(slots, fractions), len(twin_N)
