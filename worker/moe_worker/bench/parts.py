"""Where the time of a step goes: calls of kernels, added up by the part of the model they are for.

Two ways to watch a step. *As it runs*: each call of the engine's own thread counts for its
operation. *In parts*: operations that do several things in one call are run as what they are made
of, one after the other by the same implementation, and each of those counts for its part; that
costs calls and memory that the real step saves, so the parts say how the time is spread, and add up
to more than the step.
Neighbours: `moe_kernels.implementation` lets calls be watched, `profile` adds the steps up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from torch import Tensor

from moe_kernels.implementation import Call
from moe_worker.model.weights import SharedWeights

Part = Literal["qkv", "prep", "attend", "o", "route", "experts", "head", "sample", "other"]
PARTS: tuple[Part, ...] = get_args(Part)
MEANINGS: Mapping[Part, str] = {
    "qkv": "norm and projection to queries, keys, values",
    "prep": "norms of heads, rotation, keys and values into pages",
    "attend": "reading the pages",
    "o": "projection of what attention gives",
    "route": "norm, gate, choice of experts and their copies, sort",
    "experts": "routed and shared experts, dense networks",
    "head": "last norm, logits",
    "sample": "drawing tokens",
    "other": "calls that this table does not know",
}
COMPOSED = frozenset(
    ("forward", "stack", "grouped_query", "gate", "experts", "mlp", "head", "embedding")
)
"""Operations made of others."""
OF_OPERATION: Mapping[str, Part] = {
    "paged_attention": "attend",
    "latent_attention": "attend",
    "kv_pages": "prep",
    "norm_rope": "prep",
    "router": "route",
    "copies": "route",
    "permute": "route",
    "grouped_gemm": "experts",
    "activation": "experts",
    "sampling": "sample",
}
"""Where no weights tell."""
_OF_ROLE: Mapping[str, Part] = {"o": "o", "q_norm": "prep", "k_norm": "prep"}


def parts_by_weights(shared: SharedWeights) -> dict[int, Part]:
    """By the address of the weights that a product or a norm is given."""
    found: dict[int, Part] = {}

    def note(part: Part, *tensors: Tensor | None) -> None:
        found.update({of.data_ptr(): part for of in tensors if of is not None})

    note("head", shared.norm_H, shared.lm_head_VH)
    for layer in shared.layers:
        note("qkv", layer.attention_norm_H)
        note("route" if layer.router is not None else "experts", layer.mlp_norm_H)
        for role, weights in layer.attention.items():
            note(_OF_ROLE.get(role, "qkv"), weights)
        if layer.router is not None:
            note("route", layer.router.gate_EH)
        for mlp in (layer.dense, layer.shared):
            if mlp is not None:
                note("experts", mlp.w13_2IH, mlp.w2_HI, mlp.gate_1H)
    return found


def part_of(call: Call, by_weights: Mapping[int, Part]) -> Part:
    for given in call.args[1:2]:
        if isinstance(given, Tensor) and given.data_ptr() in by_weights:
            return by_weights[given.data_ptr()]
    return OF_OPERATION.get(call.operation, "other")


@dataclass
class Calls:
    """What one step called."""

    seconds: dict[str, float] = field(default_factory=dict)
    """By operation, or by part."""
    counts: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, seconds: float, count: int = 1) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        self.counts[name] = self.counts.get(name, 0) + count

    @property
    def all_seconds(self) -> float:
        return sum(self.seconds.values())


class Watch:
    """A watcher of `implementation.watched`. Only outermost calls count; within operations that are
    composed, those they are made of."""

    def __init__(
        self,
        name_of: Callable[[Call], str],
        composed: frozenset[str] = frozenset(),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._name_of, self._composed, self._clock = name_of, composed, clock
        self._calls = Calls()
        self._is_inside = False

    def __call__(self, call: Call) -> Any:
        if self._is_inside:
            return call.run()
        if call.operation in self._composed:
            return call.compose()
        self._is_inside = True
        start = self._clock()
        try:
            return call.run()
        finally:
            self._calls.add(self._name_of(call), self._clock() - start)
            self._is_inside = False

    def take(self) -> Calls:
        """What was called since the last time."""
        calls, self._calls = self._calls, Calls()
        return calls


def mean_of(steps: list[Calls]) -> Calls:
    """Seconds and calls of a step, on average."""
    total = Calls()
    for step in steps:
        for name, seconds in step.seconds.items():
            total.add(name, seconds, step.counts[name])
    count = max(len(steps), 1)
    return Calls(
        {name: seconds / count for name, seconds in total.seconds.items()},
        {name: round(calls / count) for name, calls in total.counts.items()},
    )
