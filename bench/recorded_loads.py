"""Recorded loads of real models (`tests/data/loads`), whole and as windows of a changing trace.

Neighbours: `placement` replays the trace, the planner's tests take domains from here.

Shapes: L layers, E logical experts, W windows, T tokens, K experts a token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

FOLDER = Path(__file__).resolve().parents[1] / "tests" / "data" / "loads"
MODELS = ("esft_v2lite", "olmoe_1b7b", "mixtral_8x7b")
DOMAINS = ("intent", "summary", "law", "translation")
"""Of the recording that has tokens, in the order of its trace."""

RoutingTLK = npt.NDArray[np.uint8]
LoadLE = npt.NDArray[np.float64]


def counts(model: str) -> Mapping[str, LoadLE]:
    """Assignments [L, E] of each domain of a model."""
    document = json.loads((FOLDER / f"{model}_expert_counts.json").read_text())
    return {
        domain: np.asarray(rows, dtype=np.float64) for domain, rows in document["counts"].items()
    }


def routing(domain: str) -> RoutingTLK:
    """Experts chosen by each token of a domain, in order: [tokens, 26, 6]."""
    with np.load(FOLDER / "esft_v2lite_token_routing.npz") as arrays:
        return np.asarray(arrays[domain])


def counted(routing_TLK: RoutingTLK, num_experts: int) -> LoadLE:
    """Assignments [L, E] of some tokens."""
    num_layers = routing_TLK.shape[1]
    key = np.arange(num_layers)[None, :, None] * num_experts + routing_TLK
    flat = np.bincount(key.ravel(), minlength=num_layers * num_experts)
    return flat.reshape(num_layers, num_experts).astype(np.float64)


def pairs(routing_TLK: RoutingTLK, num_experts: int) -> npt.NDArray[np.float64]:
    """Tokens that chose both of two experts, [L, E, E]."""
    num_tokens, num_layers, _ = routing_TLK.shape
    out = np.zeros((num_layers, num_experts, num_experts))
    for layer in range(num_layers):
        chosen_TE = np.zeros((num_tokens, num_experts), dtype=np.float32)
        np.put_along_axis(chosen_TE, routing_TLK[:, layer].astype(np.int64), 1.0, axis=1)
        out[layer] = chosen_TE.T @ chosen_TE
    return out


def trace(tokens_per_window: int, num_experts: int = 64, rounds: int = 2) -> list[LoadLE]:
    """Windows of a trace that goes through all domains in turn, `rounds` times: [W] of [L, E].

    What does not fill a window at the end of a domain is left out.
    """
    windows = [
        counted(tokens[start : start + tokens_per_window], num_experts)
        for tokens in map(routing, DOMAINS)
        for start in range(0, len(tokens) - tokens_per_window + 1, tokens_per_window)
    ]
    return windows * rounds
