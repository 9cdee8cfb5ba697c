"""What the card states and the tests demand: bits per byte, use of experts, imbalance, samples.

Shapes: L layers, E experts, T tokens.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from tokenizers import Tokenizer
from torch.nn import functional

from tiny_moe_training.model import TinyMoE
from tiny_moe_training.vocabulary import END_ID

RANKS = 3


@dataclasses.dataclass(frozen=True)
class TextMeasure:
    """One held-out text: `expert_counts_LE` are the top-k choices of its tokens."""

    bits_per_byte: float
    tokens: int
    expert_counts_LE: torch.Tensor


@torch.inference_mode()
def measure_text(
    model: TinyMoE, tokenizer: Tokenizer, text: str, window_tokens: int
) -> TextMeasure:
    """Reads the text in windows without overlap; each begins after an end token."""
    ids = tokenizer.encode(text).ids
    nats, counts_LE = 0.0, _no_counts(model)
    for start in range(0, len(ids), window_tokens):
        row = torch.tensor([[END_ID, *ids[start : start + window_tokens]]])
        logits, routing = model(row[:, :-1])
        nats += float(functional.cross_entropy(logits[0], row[0, 1:], reduction="sum"))
        counts_LE += torch.stack(routing.expert_counts_LE)
    return TextMeasure(nats / math.log(2) / len(text.encode()), len(ids), counts_LE)


def total_variation(one_LE: torch.Tensor, other_LE: torch.Tensor) -> list[float]:
    """½·Σ|p − q| of the two distributions over experts, for each layer."""
    p, q = (c.double() / c.sum(-1, keepdim=True) for c in (one_LE, other_LE))
    return [float(v) for v in (p - q).abs().sum(-1) / 2]


def imbalance(counts_LE: torch.Tensor, ranks: int = RANKS) -> list[float]:
    """Max rank load ÷ mean rank load of each layer, experts in contiguous equal blocks."""
    loads_LR = counts_LE.double().reshape(len(counts_LE), ranks, -1).sum(-1)
    return [float(v) for v in loads_LR.amax(-1) / loads_LR.mean(-1)]


@torch.inference_mode()
def continue_text(
    model: TinyMoE,
    tokenizer: Tokenizer,
    prompt: str,
    max_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
) -> tuple[str, bool, torch.Tensor]:
    """The continuation, whether it ended itself, and the expert choices of prompt and answer.

    Greedy at temperature 0. Reads the whole text again for every token: slow, but simple.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = [END_ID, *tokenizer.encode(prompt).ids]
    first = len(ids)
    ended, counts_LE = False, _no_counts(model)
    for _ in range(max_tokens):
        logits, routing = model(torch.tensor([ids]))
        counts_LE = torch.stack(routing.expert_counts_LE)
        if temperature > 0.0:
            probabilities = (logits[0, -1] / temperature).softmax(-1)
            following = int(torch.multinomial(probabilities, 1, generator=generator))
        else:
            following = int(logits[0, -1].argmax())
        if following == END_ID:
            ended = True
            break
        ids.append(following)
    return tokenizer.decode(ids[first:]), ended, counts_LE


def _no_counts(model: TinyMoE) -> torch.Tensor:
    return torch.zeros(
        model.config.num_hidden_layers, model.config.num_local_experts, dtype=torch.long
    )
