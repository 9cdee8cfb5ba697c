"""The angles of rotary positions: per pair of elements a frequency, for each way to stretch them.

Formulas are those of the papers as `transformers` (`ROPE_INIT_FUNCTIONS`) writes them, with the
same order of float32 operations.
Neighbours: `spec.RopeSpec` is the description, `moe_kernels.norm_rope` rotates by the tables.

`dynamic` stretches with the length of the sequence, beyond the positions the model was trained for
only. A model is served up to those positions, where it is plain: a longer sequence would turn keys
that are already in the cache by other angles than its queries.

Letters: F rotated pairs of a head.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moe_worker.model.spec import RopeSpec


def frequencies(spec: RopeSpec, length: int = 0) -> Tensor:
    """Radians per position of each pair, float32 [F]; `length` matters to `dynamic` only."""
    if spec.kind == "dynamic":
        original = spec.original_positions
        stretch = spec.factor * max(length, original) / original - (spec.factor - 1)
        return _plain(spec.theta * stretch ** (spec.dim / (spec.dim - 2)), spec.dim)
    plain_F = _plain(spec.theta, spec.dim)
    if spec.kind == "linear":
        return plain_F / spec.factor
    if spec.kind == "llama3":
        return _llama3(spec, plain_F)
    if spec.kind == "yarn":
        return _yarn(spec)
    return plain_F


def magnitude(spec: RopeSpec) -> float:
    """What cos and sin are multiplied by: YaRN's attention factor, 1 otherwise."""
    if spec.kind != "yarn":
        return 1.0
    if spec.magnitude is not None:
        return spec.magnitude
    if spec.mscale and spec.mscale_all_dim:
        return yarn_mscale(spec.factor, spec.mscale) / yarn_mscale(spec.factor, spec.mscale_all_dim)
    return yarn_mscale(spec.factor, 1.0)


def yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _plain(theta: float, dim: int) -> Tensor:
    exponents_F = torch.arange(0, dim, 2, dtype=torch.int64).to(torch.float32) / dim
    return 1.0 / (theta**exponents_F)


def _llama3(spec: RopeSpec, plain_F: Tensor) -> Tensor:
    """Long waves are stretched by the factor, short ones kept, those between go from one to the
    other."""
    original, low, high = spec.original_positions, spec.low_freq_factor, spec.high_freq_factor
    wavelength_F = 2 * math.pi / plain_F
    stretched_F = torch.where(wavelength_F > original / low, plain_F / spec.factor, plain_F)
    smooth_F = (original / wavelength_F - low) / (high - low)
    smoothed_F = (1 - smooth_F) * stretched_F / spec.factor + smooth_F * stretched_F
    between_F = (wavelength_F >= original / high) & (wavelength_F <= original / low)
    return torch.where(between_F, smoothed_F, stretched_F)


def _yarn(spec: RopeSpec) -> Tensor:
    """Pairs that turn often within the original length are kept, those that hardly turn are
    stretched, with a ramp between."""
    exponents_F = torch.arange(0, spec.dim, 2).to(torch.float32) / spec.dim
    periods_F = spec.theta**exponents_F
    low, high = (_yarn_border(spec, turns) for turns in (spec.beta_fast, spec.beta_slow))
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.dim - 1)
    if low == high:
        high += 0.001
    pairs_F = torch.arange(spec.dim // 2, dtype=torch.float32)
    kept_F = 1 - torch.clamp((pairs_F - low) / (high - low), 0, 1)
    return 1.0 / (spec.factor * periods_F) * (1 - kept_F) + 1.0 / periods_F * kept_F


def _yarn_border(spec: RopeSpec, turns: float) -> float:
    """The pair that makes this many turns within the original length."""
    ratio = spec.original_positions / (turns * 2 * math.pi)
    return spec.dim * math.log(ratio) / (2 * math.log(spec.theta))
