"""How good a placement is under a load: rank loads, imbalance, gain. The formulas of the API's
figures.

Imbalance of a layer = largest rank load ÷ mean rank load (1 = perfect); a deployment's figure is
its worst layer. Gain of a plan = (Σ over layers of the largest rank load now − the same under the
plan) ÷ now. No tokens → None, never 0 or NaN.

Shapes: L MoE layers, E logical experts, R ranks, S physical slots a rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moe_api.plan import FractionsLRS, SlotsLRS

LoadLE = npt.NDArray[np.float64]
RankLoadsLR = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Imbalance:
    worst: float
    mean: float
    """Mean of the layers that had tokens, weighted by their tokens."""
    per_layer: tuple[float | None, ...]
    """None for a layer without tokens."""


def rank_loads(slots_LRS: SlotsLRS, fractions_LRS: FractionsLRS, load_LE: LoadLE) -> RankLoadsLR:
    """Tokens that each rank receives, float64 [L, R]: Σ over its slots of load × fraction."""
    filled_LRS = slots_LRS >= 0
    layers = np.arange(slots_LRS.shape[0])[:, None, None]
    token_LRS = load_LE[layers, np.where(filled_LRS, slots_LRS, 0)] * fractions_LRS
    return np.asarray((token_LRS * filled_LRS).sum(axis=2), dtype=np.float64)


def imbalance(loads_LR: RankLoadsLR) -> Imbalance | None:
    """Largest ÷ mean rank load of each layer; None when no layer had a token."""
    totals = loads_LR.sum(axis=1)
    if not (totals > 0).any():
        return None
    num_ranks = loads_LR.shape[1]
    per_layer = tuple(
        float(row.max() * num_ranks / total) if total > 0 else None
        for row, total in zip(loads_LR, totals, strict=True)
    )
    known = [(value, total) for value, total in zip(per_layer, totals, strict=True) if value]
    weight = sum(total for _, total in known)
    return Imbalance(
        worst=max(value for value, _ in known),
        mean=float(sum(value * total for value, total in known) / weight),
        per_layer=per_layer,
    )


def gain(now_LR: RankLoadsLR, then_LR: RankLoadsLR) -> float:
    """Share of the slowest ranks' work that `then` saves: 0 = none, 0.2 = a fifth; 0 without
    tokens."""
    now = float(now_LR.max(axis=1).sum())
    return (now - float(then_LR.max(axis=1).sum())) / now if now > 0 else 0.0


def check_load(load_LE: npt.NDArray[np.generic]) -> LoadLE:
    """The load as float64 [L, E].

    Raises:
        ValueError: not two-dimensional, NaN, infinite or negative.
    """
    load = np.asarray(load_LE, dtype=np.float64)
    if load.ndim != 2:
        raise ValueError(f"load has {load.ndim} dimensions, expected [layers, experts]")
    if not np.isfinite(load).all() or (load < 0).any():
        layer, expert = (int(x) for x in np.argwhere(~np.isfinite(load) | (load < 0))[0])
        raise ValueError(
            f"load of layer {layer}, expert {expert} is {load[layer, expert]}: "
            "token counts are finite and not negative"
        )
    return load
