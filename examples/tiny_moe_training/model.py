"""The Mixtral architecture in plain torch, made for quick training on a few CPU cores.

Same mathematics as the hub's `MixtralForCausalLM` (a test compares the logits); the experts of a
layer are stacked in one parameter, and tokens are sorted by expert so that each expert is one
matrix product. `checkpoint` translates to the hub's names.

Shapes: B sequences, T tokens of one sequence, N = B·T, K = top-k, E experts, H hidden,
I expert width, D head size, V vocabulary, L layers.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import nn
from torch.nn import functional


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model, by the hub's names."""

    vocab_size: int = 1792
    hidden_size: int = 128
    intermediate_size: int = 176
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    num_local_experts: int = 12
    num_experts_per_tok: int = 2
    max_position_embeddings: int = 2048
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-5


@dataclasses.dataclass
class Routing:
    """What the routers of all layers did in one pass, for balancing and for measuring."""

    probabilities_LNE: list[torch.Tensor]
    expert_counts_LE: list[torch.Tensor]


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions (halves rotated, as in the hub)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        width = config.num_attention_heads * config.head_dim
        kv_width = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)

    def forward(
        self, x_BTH: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor
    ) -> torch.Tensor:
        batch, length, _ = x_BTH.shape
        shape = (batch, length, -1, self.config.head_dim)
        q = _rotate(self.q_proj(x_BTH).view(shape).transpose(1, 2), cos_TD, sin_TD)
        k = _rotate(self.k_proj(x_BTH).view(shape).transpose(1, 2), cos_TD, sin_TD)
        v = self.v_proj(x_BTH).view(shape).transpose(1, 2)
        repeat = self.config.num_attention_heads // self.config.num_key_value_heads
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


class SparseExperts(nn.Module):
    """Router and experts: softmax over all experts, top-k, weights renormalised."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        experts, hidden, inner = (
            config.num_local_experts,
            config.hidden_size,
            config.intermediate_size,
        )
        self.gate = nn.Linear(hidden, experts, bias=False)
        self.w1 = nn.Parameter(torch.empty(experts, inner, hidden))
        self.w3 = nn.Parameter(torch.empty(experts, inner, hidden))
        self.w2 = nn.Parameter(torch.empty(experts, hidden, inner))

    def forward(
        self, x_NH: torch.Tensor, bias_E: torch.Tensor, noise: float, routing: Routing
    ) -> torch.Tensor:
        top_k = self.config.num_experts_per_tok
        logits_NE = self.gate(x_NH) + bias_E
        if noise > 0.0:
            logits_NE = logits_NE + noise * torch.randn_like(logits_NE)
        probabilities_NE = logits_NE.softmax(-1)
        weights_NK, experts_NK = probabilities_NE.topk(top_k, -1)
        weights_NK = weights_NK / weights_NK.sum(-1, keepdim=True)

        choice = experts_NK.reshape(-1)
        order = choice.argsort(stable=True)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        counts_E = torch.bincount(choice, minlength=self.config.num_local_experts)
        # Rows are repeated, then permuted: permutations have exact, deterministic gradients.
        rows = _permute(x_NH.repeat_interleave(top_k, 0), order, back)
        parts = rows.split(counts_E.tolist())
        done = [
            functional.linear(
                functional.silu(functional.linear(part, w1)) * functional.linear(part, w3), w2
            )
            for part, w1, w3, w2 in zip(
                parts, self.w1.unbind(), self.w3.unbind(), self.w2.unbind(), strict=True
            )
        ]
        out = _permute(torch.cat(done), back, order).view(*weights_NK.shape, -1)

        routing.probabilities_LNE.append(probabilities_NE)
        routing.expert_counts_LE.append(counts_E)
        return (out * weights_NK.unsqueeze(-1)).sum(1)


class Layer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.block_sparse_moe = SparseExperts(config)


class TinyMoE(nn.Module):
    """The language model: token ids [B, T] to logits [B, T, V]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        _initialise(self)

    def forward(
        self, tokens_BT: torch.Tensor, bias_LE: torch.Tensor | None = None, noise: float = 0.0
    ) -> tuple[torch.Tensor, Routing]:
        """`bias_LE` is added to the router logits (bias balancing); `noise` is the standard
        deviation of Gaussian noise on them."""
        config = self.config
        if bias_LE is None:
            bias_LE = torch.zeros(config.num_hidden_layers, config.num_local_experts)
        x_BTH = self.embed_tokens(tokens_BT)
        cos_TD, sin_TD = _rotary(tokens_BT.shape[1], config)
        routing = Routing([], [])
        for layer, bias_E in zip(self.layers, bias_LE, strict=True):
            x_BTH = x_BTH + layer.self_attn(layer.input_layernorm(x_BTH), cos_TD, sin_TD)
            flat = layer.post_attention_layernorm(x_BTH).reshape(-1, config.hidden_size)
            x_BTH = x_BTH + layer.block_sparse_moe(flat, bias_E, noise, routing).view_as(x_BTH)
        return self.lm_head(self.norm(x_BTH)), routing


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, order, back):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(back)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (back,) = ctx.saved_tensors
        return grad.index_select(0, back), None, None


def _permute(rows: torch.Tensor, order: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
    """rows[order]; `back` is the inverse permutation, used for the gradient."""
    return _Permute.apply(rows, order, back)


def _rotary(length: int, config: ModelConfig) -> tuple[torch.Tensor, torch.Tensor]:
    half = torch.arange(0, config.head_dim, 2).float() / config.head_dim
    angles = torch.outer(torch.arange(length).float(), config.rope_theta**-half)
    angles_TD = torch.cat([angles, angles], -1)
    return angles_TD.cos(), angles_TD.sin()


def _rotate(x: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cos_TD + torch.cat([-second, first], -1) * sin_TD


def _initialise(model: TinyMoE) -> None:
    """Normal weights scaled by fan-in; what is added to the residual stream starts smaller."""
    residual = (2 * model.config.num_hidden_layers) ** -0.5
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            continue
        std = 0.6 * parameter.shape[-1] ** -0.5
        if name.endswith(("o_proj.weight", "w2")):
            std *= residual
        elif name.endswith(("embed_tokens.weight", "lm_head.weight", "gate.weight")):
            std = 0.02
        nn.init.normal_(parameter, std=std)
