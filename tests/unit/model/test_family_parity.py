"""Every family against `transformers`: float32 logits within 1e-4, the same greedy text, and
bfloat16 within a bound."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.family_models import (
    CLASSES,
    NUM_TOKENS,
    SEEDS,
    assert_parity,
    expected_logits,
    prompts,
    reference,
    save_family,
)
from tests.support.one_rank import OneRank

MAX_BF16_ERROR = 0.15
"""Of the logits' standard deviation."""
pytestmark = pytest.mark.usefixtures("implementation")
VARIANTS: list[tuple[str, int, dict[str, Any]]] = [
    ("mixtral", 3, {"num_experts_per_tok": 1, "sliding_window": None}),
    ("qwen2_moe", 2, {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 2,
                      "norm_topk_prob": True, "mlp_only_layers": []}),
    ("qwen3_moe", 3, {"attention_bias": True, "norm_topk_prob": False, "mlp_only_layers": [0],
                      "decoder_sparse_step": 1, "tie_word_embeddings": True,
                      "use_sliding_window": True, "sliding_window": 20}),
    ("olmoe", 3, {"num_key_value_heads": 4, "clip_qkv": None, "norm_topk_prob": True}),
    ("granitemoe", 9, {"attention_bias": True, "tie_word_embeddings": False}),
]  # fmt: skip
ROPES: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64},
    {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64,
     "low_freq_factor": 1.0, "high_freq_factor": 4.0},
]  # fmt: skip


@pytest.mark.parametrize("family", CLASSES)
def test_logits_and_text_are_theirs(tmp_path: Path, family: str) -> None:
    assert_parity(save_family(tmp_path, family), prompts(SEEDS[family]))


@pytest.mark.parametrize(
    ("family", "seed", "changes"), VARIANTS, ids=[name for name, *_ in VARIANTS]
)
def test_options_of_a_family_are_theirs(
    tmp_path: Path, family: str, seed: int, changes: dict[str, Any]
) -> None:
    assert_parity(save_family(tmp_path, family, seed=seed, **changes), prompts(seed))


@pytest.mark.parametrize("rope", ROPES, ids=[rope["rope_type"] for rope in ROPES])
def test_stretched_positions_are_theirs(tmp_path: Path, rope: dict[str, Any]) -> None:
    stretched = {"rope_theta": 1e4, **rope}
    path = save_family(tmp_path, "qwen3_moe", num_hidden_layers=2, rope_parameters=stretched)
    assert_parity(path, prompts(1, lengths=(100, 7, 12)))


@pytest.mark.parametrize("family", CLASSES)
def test_bfloat16_stays_close(tmp_path: Path, family: str) -> None:
    """Their float32 of the same bfloat16 weights is the truth; ours rounds what products take in
    and what the cache keeps."""
    path = save_family(tmp_path, family, dtype=torch.bfloat16)
    asked = prompts(SEEDS[family], lengths=(40,))
    (trace,) = OneRank.load(path).generate(asked, max_tokens=NUM_TOKENS, kv_dtype="bf16")
    expected = expected_logits(reference(path), asked[0], trace)
    error = (torch.stack(trace.logits) - expected).abs()
    assert float(error.max()) <= MAX_BF16_ERROR * float(expected.std()), error.max()
    # Where their two best lie closer than the error, either may come out.
    same = expected.argmax(dim=-1) == torch.tensor(trace.tokens)
    assert int(same.sum()) >= 0.9 * NUM_TOKENS
