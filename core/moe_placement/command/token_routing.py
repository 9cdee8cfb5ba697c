"""Recorded token routing: <corpus> [tokens, layers, experts a token] of expert ids, beside
<corpus>_doc_lengths.

Shapes: W windows, T tokens, L MoE layers, E logical experts, K experts a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from moe_placement.command.arrays import Array
from moe_placement.command.choice import Choice, WindowsWLE
from moe_placement.command.usage import UsageError
from moe_placement.score import LoadLE

DOC_LENGTHS = "_doc_lengths"
MAX_EXPERTS = 65536


def is_routing(found: Mapping[str, Array]) -> bool:
    return any(name.endswith(DOC_LENGTHS) for name in found)


def windows(flag: str, path: Path, found: Mapping[str, Array], choice: Choice) -> WindowsWLE:
    """Loads [W, L, E] of all windows of the chosen corpora, one corpus after another.

    The last window of a corpus is left out when it is shorter, unless it is the only one.

    Raises:
        UsageError: arrays that are no routing, or an expert that the model does not have.
    """
    tokens = {name: array for name, array in found.items() if not name.endswith(DOC_LENGTHS)}
    for name, array in tokens.items():
        if array.ndim != 3 or array.dtype.kind not in "iu" or not array.size:
            raise UsageError(
                f"{flag}: {path}: {name} has shape {array.shape} of {array.dtype}: token routing "
                "is integers [tokens, layers, experts a token]"
            )
        if int(array.min()) < 0:
            raise UsageError(f"{flag}: {path}: {name} names expert {array.min()}: ids begin at 0")
    names = choice.names(flag, path, list(tokens))
    if len({tokens[name].shape[1] for name in names}) != 1:
        raise UsageError(f"{flag}: {path}: its corpora differ in layers: choose with --corpus")
    num_experts = _num_experts(flag, path, tokens, choice.num_experts)
    loads: list[LoadLE] = []
    for name in names:
        size = choice.window_tokens or len(tokens[name])
        for start in range(0, max(len(tokens[name]) - size + 1, 1), size):
            loads.append(_counts(tokens[name][start : start + size], num_experts))
    return np.stack(loads)


def _num_experts(flag: str, path: Path, tokens: Mapping[str, Array], wanted: int | None) -> int:
    largest = max(int(array.max()) for array in tokens.values())
    if wanted is None and largest < MAX_EXPERTS:
        return largest + 1
    if wanted is None or largest >= wanted:
        raise UsageError(
            f"{flag}: {path} names expert {largest}: give the model's number of experts by "
            f"--experts ({wanted or MAX_EXPERTS} are too few)"
        )
    return wanted


def _counts(tokens_TLK: Array, num_experts: int) -> LoadLE:
    num_layers = tokens_TLK.shape[1]
    keys = tokens_TLK.astype(np.int64) + np.arange(num_layers)[None, :, None] * num_experts
    counts = np.bincount(keys.ravel(), minlength=num_layers * num_experts)
    return counts.reshape(num_layers, num_experts).astype(np.float64)
