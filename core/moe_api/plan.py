"""GroupPlan: who is in an EP group (generation) and where its experts are (epoch).

The operator stores it as `ExpertPlacement.spec` and PUTs the same content to every member;
`moe_placement` computes its slots; workers act only on a newer one (the fencing rule of `Fence`).

Shapes: L MoE layers, R ranks (= members, in plan order), S physical slots a rank (serving + spare).
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from typing import Annotated, NamedTuple, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from moe_api.document import Document, Part

FRACTION_UNITS = 65535
"""Fractions travel as uint16; an expert's copies sum to this."""

SlotsLRS = npt.NDArray[np.int32]
FractionsLRS = npt.NDArray[np.float64]


class PlanError(ValueError):
    """A plan that contradicts itself; the message names layer, rank or member."""


class Fence(NamedTuple):
    """Order of plans: compared in this order, and only ever growing."""

    leader_epoch: int
    generation: int
    epoch: int


class Member(Part):
    """One worker of the group; its index in `GroupPlan.members` is its rank."""

    id: int = Field(ge=0)
    pod: str
    uid: str
    address: str = Field(min_length=1)
    incarnation: str
    domains: list[str] = Field(default_factory=list)
    """Topology domains of its node, broad to narrow (one per level in use)."""


class LayerPlacement(Part):
    """Physical slots of one MoE layer, rank by rank: `"0,3,7,-1;…"`, −1 = free."""

    layer: int = Field(ge=0)
    slots: str
    fractions: str | None = None
    """Base64 of big-endian uint16 per physical slot (/65535); absent = even split."""


class PlanLimits(Part):
    max_bytes_per_second: int = 200_000_000
    deadline_seconds: int = 120


class PreviousPlacement(Part):
    epoch: int
    layers: list[LayerPlacement]


class GroupPlan(Document):
    namespace: str
    deployment: str
    group: int = Field(ge=0)
    leader_epoch: int = Field(ge=1)
    generation: int = Field(ge=1)
    epoch: int = Field(ge=1)
    members: list[Member] = Field(min_length=1, max_length=1024)
    layers: list[LayerPlacement] = Field(min_length=1, max_length=1024)
    sources: list[Annotated[int, Field(ge=0, le=FRACTION_UNITS)]] | None = None
    """How many of all tokens each rank's requests bring, in units of 1 / FRACTION_UNITS, rank by
    rank. When given, ranks send tokens to near copies first, so far as the copies' fractions hold
    for tokens that come like this; absent = each rank keeps to the fractions by itself."""
    limits: PlanLimits = PlanLimits()
    previous: PreviousPlacement | None = None
    hash: str = ""

    @model_validator(mode="after")
    def _one_source_a_rank(self) -> Self:
        if self.sources is not None and len(self.sources) != len(self.members):
            raise ValueError(f"{len(self.sources)} sources for {len(self.members)} members")
        return self

    @property
    def fence(self) -> Fence:
        return Fence(self.leader_epoch, self.generation, self.epoch)

    def rank_of(self, member_id: int) -> int | None:
        """Rank of a member in this plan, None when it is not in it."""
        for rank, member in enumerate(self.members):
            if member.id == member_id:
                return rank
        return None

    def sealed(self) -> Self:
        """The same plan with its content hash filled in."""
        return self.model_copy(update={"hash": self.content_hash()})

    def content_hash(self) -> str:
        """SHA-256 over what the plan asks for: not over fence of the leader, `previous` or
        `hash`."""
        wire = self.to_wire()
        for key in ("hash", "previous", "leaderEpoch", "schema"):
            wire.pop(key, None)
        text = json.dumps(wire, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def slots(self) -> SlotsLRS:
        """Expert in each physical slot, int32 [L, R, S], −1 = free.

        Raises:
            PlanError: rows of unequal length, or not as many ranks as members.
        """
        return decode_slots(self.layers, num_ranks=len(self.members))

    def fractions(self) -> FractionsLRS:
        """Share of its expert's tokens per slot, float64 [L, R, S]; even split where not given."""
        return decode_fractions(self.layers, self.slots())


def encode_layers(slots: SlotsLRS, fractions: FractionsLRS | None = None) -> list[LayerPlacement]:
    """Arrays [L, R, S] to the wire form; fractions None = even split.

    Fractions are rounded so that an expert's copies sum to FRACTION_UNITS (largest remainder); a
    layer that is split evenly carries none.
    """
    given: list[str | None] = [None] * len(slots)
    if fractions is not None:
        units = fraction_units(slots, fractions)
        uneven_L = ~np.isclose(fractions, even_fractions(slots), rtol=0, atol=1e-9).all(axis=(1, 2))
        for layer in np.flatnonzero(uneven_L).tolist():
            given[layer] = base64.b64encode(units[layer].astype(">u2").tobytes()).decode()
    return [
        LayerPlacement(
            layer=layer,
            slots=";".join(",".join(map(str, row)) for row in rows),
            fractions=given[layer],
        )
        for layer, rows in enumerate(slots.tolist())
    ]


def decode_slots(layers: Sequence[LayerPlacement], num_ranks: int) -> SlotsLRS:
    """Wire form to int32 [L, R, S]. Raises PlanError naming the layer that does not fit."""
    rows: list[list[list[int]]] = []
    for placement in layers:
        try:
            ranks = [[int(e) for e in row.split(",")] for row in placement.slots.split(";")]
        except ValueError as error:
            raise PlanError(f"layer {placement.layer}: slots are not integers: {error}") from error
        widths = {len(row) for row in ranks}
        if len(ranks) != num_ranks or len(widths) != 1 or (rows and len(rows[0][0]) not in widths):
            raise PlanError(
                f"layer {placement.layer}: {len(ranks)} ranks with {sorted(widths)} slots, "
                f"expected {num_ranks} ranks with as many slots each as the other layers"
            )
        rows.append(ranks)
    return np.asarray(rows, dtype=np.int32)


def decode_fractions(layers: Sequence[LayerPlacement], slots: SlotsLRS) -> FractionsLRS:
    """Wire form to float64 [L, R, S]; a layer without fractions gets an even split.

    Raises PlanError naming the layer whose fractions do not fit its slots.
    """
    out = even_fractions(slots)
    for index, placement in enumerate(layers):
        if placement.fractions is None:
            continue
        try:
            units = np.frombuffer(base64.b64decode(placement.fractions), dtype=">u2")
        except ValueError as error:
            raise PlanError(
                f"layer {placement.layer}: fractions are not base64 of uint16: {error}"
            ) from error
        if units.size != slots[index].size:
            raise PlanError(
                f"layer {placement.layer}: {units.size} fractions for {slots[index].size} slots"
            )
        out[index] = units.reshape(slots[index].shape) / FRACTION_UNITS
    return out


def even_fractions(slots: SlotsLRS) -> FractionsLRS:
    """1 / (number of copies of the slot's expert in its layer), 0 for free slots."""
    out = np.zeros(slots.shape, dtype=np.float64)
    for layer in range(slots.shape[0]):
        filled = slots[layer] >= 0
        if filled.any():
            copies = np.bincount(slots[layer][filled])
            out[layer][filled] = 1.0 / copies[slots[layer][filled]]
    return out


def fraction_units(slots: SlotsLRS, fractions: FractionsLRS) -> npt.NDArray[np.int64]:
    """Fractions in units of 1 / FRACTION_UNITS, int64 [L, R, S], that sum exactly for each expert.

    An expert whose fractions are all zero is split evenly.
    """
    layer_N, rank_N, slot_N = np.nonzero(slots >= 0)
    key_N = layer_N * (int(slots.max(initial=0)) + 1) + slots[layer_N, rank_N, slot_N]
    _, expert_N = np.unique(key_N, return_inverse=True)
    share_N = np.maximum(fractions[layer_N, rank_N, slot_N], 0.0)
    total_N = np.bincount(expert_N, share_N)[expert_N]
    copies_N = np.bincount(expert_N)[expert_N]
    share_N = np.where(total_N > 0, share_N / np.where(total_N > 0, total_N, 1.0), 1.0 / copies_N)
    exact_N = share_N * FRACTION_UNITS
    units_N = np.floor(exact_N).astype(np.int64)
    missing_E = FRACTION_UNITS - np.bincount(expert_N, units_N).astype(np.int64)
    # One more unit for the largest remainders of each expert, among equals the lowest slot.
    order = np.lexsort((np.arange(len(expert_N)), units_N - exact_N, expert_N))
    first_E = np.searchsorted(expert_N[order], np.arange(len(missing_E)))
    place_N = np.arange(len(order)) - first_E[expert_N[order]]
    units_N[order] += place_N < missing_E[expert_N[order]]
    out = np.zeros(slots.shape, dtype=np.int64)
    out[layer_N, rank_N, slot_N] = units_N
    return out
