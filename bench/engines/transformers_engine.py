"""transformers with `grouped_mm`, its best way to compute experts on CPUs, in BF16 and in FP32.

Set explicitly: `eager` loops over experts in Python and `batched_mm` copies weights for each token,
so comparing with either flatters whoever is compared. Both dtypes run, because without AVX-512 the
BF16 products of torch may be the slower ones; the table shows the better.
Neighbour: `workload` says what is run.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from bench.engines import workload
from bench.engines.workload import Figure, Task, Tell

EXPERTS = "grouped_mm"
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@torch.inference_mode()
def measure(task: Task, tell: Tell) -> None:
    torch.set_num_threads(task.threads)
    for name, dtype in DTYPES.items():
        model = AutoModelForCausalLM.from_pretrained(task.model, dtype=dtype).eval()
        default = getattr(model.config, "_experts_implementation", None)
        model.set_experts_implementation(EXPERTS)
        details = {"experts": EXPERTS, "experts_by_default": default}
        for batch in workload.DECODE_BATCHES:
            if task.wants(f"decode-{batch}"):
                tell(_decode(model, name, batch, task, details))
        if task.wants("prefill"):
            tell(_prefill(model, name, task, details))
        if task.wants("logits") and task.round == 0:
            _logits(model, task, name)


def _decode(model: Any, variant: str, batch: int, task: Task, details: dict[str, Any]) -> Figure:
    seed = task.round
    vocab_size, most = model.config.vocab_size, workload.STEPS + workload.SKIPPED_STEPS
    ids = torch.from_numpy(workload.random_ids(seed, vocab_size, batch, workload.PROMPT_TOKENS))
    fed = torch.from_numpy(workload.random_ids(seed + 1, vocab_size, most, batch, 1))
    cache = DynamicCache(config=model.config)
    _forward(model, ids, cache)
    seconds = workload.timed_steps(task.now, lambda step: _forward(model, fed[step], cache), most)
    with _touched(model) as touched:
        _forward(model, fed[0], cache)
    return workload.rate(
        f"decode-{batch}", variant, batch, seconds, touched=statistics.mean(touched), **details
    )


def _prefill(model: Any, variant: str, task: Task, details: dict[str, Any]) -> Figure:
    ids = torch.from_numpy(
        workload.random_ids(
            task.round, model.config.vocab_size, workload.PREFILLS + 1, 1, workload.PREFILL_TOKENS
        )
    )
    seconds = workload.timed_steps(
        task.now,
        lambda step: _forward(model, ids[step], DynamicCache(config=model.config)),
        workload.PREFILLS + 1, skipped=1,
    )  # fmt: skip
    return workload.rate("prefill", variant, workload.PREFILL_TOKENS, seconds, **details)


def _forward(model: Any, ids: Tensor, cache: DynamicCache) -> list[int]:
    """The likeliest next tokens."""
    out = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    likeliest: list[int] = out.logits[:, -1].argmax(-1).tolist()
    return likeliest


@contextmanager
def _touched(model: Any) -> Iterator[list[int]]:
    """Experts that each layer chose in the block, for models whose gate is a module that returns
    its choice last."""
    found: list[int] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(
            lambda module, given, out: found.append(len(out[-1].unique()))
        )
        for layer in model.model.layers
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _logits(model: Any, task: Task, variant: str) -> None:
    prompts = workload.random_ids(
        0, model.config.vocab_size, workload.LOGIT_PROMPTS, workload.LOGIT_TOKENS
    )
    logits = model(torch.from_numpy(prompts), logits_to_keep=1).logits[:, -1].float()
    workload.keep_logits(task, "transformers", variant, logits.numpy())
