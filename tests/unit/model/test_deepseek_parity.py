"""DeepSeek-V2 and V3 against `transformers`: float32 logits within 1e-4, the same greedy text, and
bfloat16 within a bound."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.deepseek_models import CLASSES, save_deepseek
from tests.support.family_models import assert_parity, expected_logits, prompts, reference
from tests.support.one_rank import OneRank

V2_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "mscale": 0.707,
           "mscale_all_dim": 0.9, "original_max_position_embeddings": 64}  # fmt: skip
V3_YARN = {**V2_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}
pytestmark = pytest.mark.usefixtures("implementation")
VARIANTS: list[tuple[str, str, int, dict[str, Any]]] = [
    ("v2-greedy", "deepseek_v2", 2, {"topk_method": "greedy", "n_group": None, "topk_group": None}),
    ("v2-lite", "deepseek_v2", 2, {"q_lora_rank": None, "routed_scaling_factor": 1.0}),
    ("v2-bias", "deepseek_v2", 5, {"attention_bias": True, "first_k_dense_replace": 0}),
    ("v2-yarn", "deepseek_v2", 2, {"rope_parameters": V2_YARN}),
    ("v3-yarn", "deepseek_v3", 2, {"rope_parameters": V3_YARN, "first_k_dense_replace": 2}),
    ("v3-halves", "deepseek_v3", 7, {"rope_interleave": False, "attention_bias": True}),
    ("v3-one-group", "deepseek_v3", 2, {"n_group": 1, "topk_group": 1, "norm_topk_prob": False}),
    ("v3-wide", "deepseek_v3", 15, {"kv_lora_rank": 128, "v_head_dim": 40, "n_routed_experts": 16}),
]
"""Name, family, a seed whose text has many different tokens, and changes to the config."""
MAX_BFLOAT16_ERROR = 0.108
"""Of a logit, in standard deviations of the logits; measured: .055 (V2) and .063 (V3)."""


@pytest.mark.parametrize("family", CLASSES)
def test_logits_and_text_are_theirs(tmp_path: Path, family: str) -> None:
    assert_parity(save_deepseek(tmp_path, family), prompts(1))


@pytest.mark.parametrize(
    ("family", "seed", "changes"),
    [case[1:] for case in VARIANTS],
    ids=[case[0] for case in VARIANTS],
)
def test_options_of_a_family_are_theirs(
    tmp_path: Path, family: str, seed: int, changes: dict[str, Any]
) -> None:
    path = save_deepseek(tmp_path, family, seed=seed, **changes)
    assert_parity(path, prompts(seed, lengths=(70, 9, 25)))


@pytest.mark.parametrize("family", CLASSES)
def test_bfloat16_stays_close(tmp_path: Path, family: str) -> None:
    """Their float32 of the same bfloat16 weights is the truth; ours rounds inputs of products."""
    path = save_deepseek(tmp_path, family, dtype=torch.bfloat16)
    asked = prompts(1, lengths=(40,))
    (trace,) = OneRank.load(path).generate(asked, max_tokens=32, kv_dtype="bf16")
    expected = expected_logits(reference(path), asked[0], trace)
    error = (torch.stack(trace.logits) - expected).abs()
    assert float(error.max() / expected.std()) <= MAX_BFLOAT16_ERROR
    assert expected.argmax(dim=-1).tolist() == trace.tokens
