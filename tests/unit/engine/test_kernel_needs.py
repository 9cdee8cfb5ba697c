"""A start compiles what the model's weights need, and no kernel for a type that it has not."""

from __future__ import annotations

from pathlib import Path

import torch

from moe_worker.engine.kernel_needs import kernel_needs
from moe_worker.model.config import load_architecture
from tests.support.deepseek_models import save_deepseek
from tests.support.family_models import save_family

BF16 = torch.bfloat16


def test_a_router_like_all_other_weights_asks_for_no_float32(tmp_path: Path) -> None:
    save_family(tmp_path, "qwen3_moe")
    needs = kernel_needs(load_architecture(tmp_path).held_in("bfloat16"))
    assert (needs.dtypes, needs.routers) == ({BF16}, {BF16})


def test_a_router_kept_in_float32_asks_for_it_alone(tmp_path: Path) -> None:
    save_deepseek(tmp_path, "deepseek_v3")
    needs = kernel_needs(load_architecture(tmp_path).held_in("bfloat16"))
    assert (needs.dtypes, needs.routers) == ({BF16}, {torch.float32})
