"""The training loop: batches, schedule, loss, balancing, progress and resumable states.

Everything random in a step comes from the seed and the step's number, so that a resumed run
continues exactly as if it had not been interrupted. `balance` has the two balancing methods.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional

from tiny_moe_training.balance import auxiliary_loss, moved_bias
from tiny_moe_training.model import TinyMoE

# Share of each kind of text in a batch.
MIXTURE = {"code": 0.40, "english": 0.34, "other": 0.06, "chat": 0.20}


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """What decides the weights, together with the corpus and the model's sizes."""

    steps: int
    seed: int
    sequence_tokens: int
    batch_sequences: int
    learning_rate: float
    balancing: str
    auxiliary_coefficient: float
    bias_step: float
    router_noise: float
    warmup_steps: int = 100
    decay_share: float = 0.35
    weight_decay: float = 0.1
    gradient_norm: float = 1.0

    @property
    def decay_steps(self) -> int:
        return int(self.steps * self.decay_share)


def schedule(step: int, config: TrainingConfig) -> float:
    """Factor of the learning rate: rise, plateau, straight decay to zero. The plateau lets a run
    be continued with more steps."""
    rise = min(1.0, (step + 1) / config.warmup_steps)
    return rise * faded(step, config)


def faded(step: int, config: TrainingConfig) -> float:
    """1 until the decay begins, then straight down to 0 at the last step."""
    return min(1.0, (config.steps - 1 - step) / max(1, config.decay_steps))


def train(
    model: TinyMoE,
    streams: dict[str, torch.Tensor],
    config: TrainingConfig,
    state_path: Path,
    save: Callable[[TinyMoE], None],
    save_every: int,
) -> None:
    """Trains in place from the state at `state_path`, if there is one, to the last step.

    `streams` are the token ids of each kind as one row; `save(model)` is called at each state.
    """
    torch.manual_seed(config.seed)
    optimizer = _optimizer(model, config)
    bias_LE = torch.zeros(model.config.num_hidden_layers, model.config.num_local_experts)
    first = 0
    if state_path.exists():
        state = torch.load(state_path, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        bias_LE, first = state["bias_LE"], state["step"]
    progress = _Progress(first, config)
    model.train()
    for step in range(first, config.steps):
        torch.manual_seed(config.seed * 1_000_003 + step)
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * schedule(step, config)
        tokens_BT = _batch(streams, config)
        used_bias_LE = bias_LE * faded(step, config)
        logits, routing = model(tokens_BT[:, :-1], used_bias_LE, config.router_noise)
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens_BT[:, 1:].flatten())
        extra = auxiliary_loss(routing)
        if config.balancing == "loss":
            (loss + config.auxiliary_coefficient * extra).backward()
        else:
            loss.backward()
            bias_LE = moved_bias(bias_LE, routing.expert_counts_LE, config.bias_step)
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.gradient_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        progress.show(step, float(loss.detach()), float(extra.detach()))
        if (step + 1) % save_every == 0 or step + 1 == config.steps:
            _save_state(state_path, model, optimizer, bias_LE, step + 1)
            save(model)


def _optimizer(model: TinyMoE, config: TrainingConfig) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95), fused=True)


def _batch(streams: dict[str, torch.Tensor], config: TrainingConfig) -> torch.Tensor:
    """[batch, sequence + 1] token ids: windows at random places, kinds in the fixed mixture."""
    kinds = list(MIXTURE)
    shares = torch.tensor([MIXTURE[kind] for kind in kinds])
    # Stratified: the number of rows of a kind differs by at most one from its share.
    places = (torch.arange(config.batch_sequences) + torch.rand(1)) / config.batch_sequences
    chosen = torch.searchsorted(shares.cumsum(0), places).clamp_max(len(kinds) - 1)
    length = config.sequence_tokens + 1
    rows = []
    for choice in chosen.tolist():
        stream = streams[kinds[choice]]
        start = int(torch.randint(len(stream) - length, (1,)))
        rows.append(stream[start : start + length])
    return torch.stack(rows)


def _save_state(
    path: Path, model: TinyMoE, optimizer: torch.optim.Optimizer, bias_LE: torch.Tensor, step: int
) -> None:
    partial = path.with_suffix(".partial")
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "bias_LE": bias_LE,
        "step": step,
    }
    torch.save(state, partial)
    os.replace(partial, path)


class _Progress:
    """One line on a terminal, one line per 50 steps in a log."""

    def __init__(self, first: int, config: TrainingConfig) -> None:
        self.first, self.config = first, config
        self.began = time.monotonic()
        self.loss = 0.0

    def show(self, step: int, loss: float, extra: float) -> None:
        self.loss = loss if step == self.first else 0.95 * self.loss + 0.05 * loss
        live = sys.stderr.isatty()
        if not live and (step + 1) % 50 and step + 1 != self.config.steps:
            return
        elapsed_seconds = time.monotonic() - self.began
        per_second = (step + 1 - self.first) / elapsed_seconds
        tokens = per_second * self.config.batch_sequences * self.config.sequence_tokens
        start = "\r" if live else ""
        left_seconds = (self.config.steps - step - 1) / per_second
        print(
            f"{start}step {step + 1}/{self.config.steps}  loss {self.loss:.3f}  "
            f"balance {extra:.2f}  {tokens:,.0f} tokens/s  {elapsed_seconds / 60:.1f} min  "
            f"{left_seconds / 60:.1f} min left ",
            end="" if live and step + 1 != self.config.steps else "\n",
            file=sys.stderr,
            flush=True,
        )
