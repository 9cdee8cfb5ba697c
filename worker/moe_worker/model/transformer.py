"""The transformer of every family, with its experts elsewhere.

Dense parts and attention run here on this rank's own tokens; what follows attention in a MoE layer
is done by the given `moe` callable. It is called in every step, with no tokens too, because other
ranks wait for this one.
Neighbours: `spec` describes the model, `weights` gives the tensors, `attention` and `second_half`
are the parts, `moe_worker.expert.layer` is `moe`, `moe_worker.engine.runner` calls `forward`.

Letters: T tokens, H hidden, V vocabulary, B sampled rows.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from moe_kernels.attention_step import AttentionStep
from moe_kernels.forward import Ends
from moe_kernels.head import Embedding, Head, embed, head_logits
from moe_kernels.kv_pages import KvPages
from moe_kernels.norm_rope import rope_table
from moe_kernels.step_tokens import StepTokens
from moe_worker.model import rope
from moe_worker.model.attention_kinds import build_attention
from moe_worker.model.layer_run import LayerRun, runs_of
from moe_worker.model.second_half import ExpertHalf, build_second_half
from moe_worker.model.spec import ModelSpec
from moe_worker.model.weights import SharedWeights


class Moe(Protocol):
    def __call__(self, ordinal: int, x_TH: Tensor, half: ExpertHalf, /) -> Tensor:
        """The half of MoE layer number `ordinal` (counting MoE layers), float32 [T, H]."""
        ...

    def whole(
        self, run: LayerRun, pages_L: tuple[KvPages, ...], x_TH: Tensor, step: AttentionStep, /
    ) -> Tensor | None:
        """All of a run's layers at once, of the model's pages; None, and nothing done, where the
        step is too large."""
        ...

    def forward(
        self, run: LayerRun, pages_L: tuple[KvPages, ...], tokens: StepTokens, ends: Ends, /
    ) -> Tensor | None:
        """The same of a run that is all layers, with the model's ends: logits float32 [B, V]; None
        also where other ranks take part."""
        ...


class Cache(Protocol):
    @property
    def layers(self) -> tuple[KvPages, ...]: ...


class Transformer:
    def __init__(
        self, arch: ModelSpec, shared: SharedWeights, max_positions: int | None = None
    ) -> None:
        """For sequences of up to `max_positions` tokens; absent = as the model allows."""
        self.arch = arch
        self.shared = shared
        device = shared.embedding_VH.device
        self.max_positions = max_positions or arch.max_positions
        self._attentions = [
            build_attention(arch, layer, weights.attention_norm_H, weights.attention)
            for layer, weights in enumerate(shared.layers)
        ]
        multipliers = arch.multipliers
        # On the processor first, so that every device turns by the same angles.
        table = rope_table(
            self.max_positions, rope.frequencies(arch.rope), rope.magnitude(arch.rope)
        )
        cos_PF, sin_PF = (part.to(device) for part in table)
        self._ends = Ends(
            Embedding(shared.embedding_VH, multipliers.embedding),
            cos_PF,
            sin_PF,
            Head(shared.norm_H, arch.rms_eps, shared.lm_head_VH, multipliers.logits),
        )
        self._second_halves = [build_second_half(arch, weights) for weights in shared.layers]
        self._ordinals = {number: ordinal for ordinal, number in enumerate(arch.moe_layers)}
        runs = runs_of(self._attentions, self._second_halves)
        self._runs = {run.first_layer: run for run in runs}
        self._all = next((run for run in runs if len(run.layers) == arch.num_layers), None)
        """The run of all layers, where they are one."""

    def forward(self, tokens: StepTokens, cache: Cache, moe: Moe) -> Tensor:
        """Logits float32 [B, V] of the step's sampled rows; writes its keys and values."""
        if self._all is not None:
            logits_BV = moe.forward(self._all, cache.layers, tokens, self._ends)
            if logits_BV is not None:
                return logits_BV
        return self._by_parts(tokens, cache, moe)

    @torch.inference_mode()
    def _by_parts(self, tokens: StepTokens, cache: Cache, moe: Moe) -> Tensor:
        x_TH = embed(tokens.ids_T, self._ends.embedding)
        step = self._ends.attention_step(tokens)
        number = 0
        while number < self.arch.num_layers:
            run = self._runs.get(number)
            whole_TH = None if run is None else moe.whole(run, cache.layers, x_TH, step)
            if run is None or whole_TH is None:
                x_TH = self._layer(number, x_TH, cache.layers[number], step, moe)
                number += 1
            else:
                x_TH, number = whole_TH, run.end_layer
        return head_logits(x_TH, tokens.sample_rows_B, self._ends.head)

    def _layer(
        self, number: int, x_TH: Tensor, pages: KvPages, step: AttentionStep, moe: Moe
    ) -> Tensor:
        x_TH = self._attentions[number](x_TH, pages, step)
        half = self._second_halves[number]
        if isinstance(half, ExpertHalf):
            return moe(self._ordinals[number], x_TH, half)
        return half(x_TH)
