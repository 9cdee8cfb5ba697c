"""DeepSeek checkpoints: FP8 blocks read as what they stand for, and refusals by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moe_worker.model.config import ModelHasNoExperts, ModelUnreadable, load_architecture
from moe_worker.model.fp8_blocks import Fp8Blocks
from moe_worker.model.spec import LatentSpec
from moe_worker.model.weights import Checkpoint
from tests.support.deepseek_models import (
    from_fp8_blocks,
    save_deepseek,
    save_fp8_and_twin,
    to_fp8_blocks,
)
from tests.support.family_models import prompts
from tests.support.one_rank import OneRank

WIDE: dict[str, Any] = {
    "hidden_size": 192, "intermediate_size": 200, "moe_intermediate_size": 136,
    "kv_lora_rank": 144, "num_hidden_layers": 2, "n_routed_experts": 4, "n_group": 2,
    "topk_group": 1, "num_experts_per_tok": 2,
}  # fmt: skip
"""More than one block in each direction, the last ones cut."""
EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"
KV_B = "model.layers.0.self_attn.kv_b_proj.weight"


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """(FP8, its decoded twin)."""
    root: Path = tmp_path_factory.mktemp("models")
    plain = save_deepseek(root / "plain", "deepseek_v3", seed=6, dtype=request.param, **WIDE)
    save_fp8_and_twin(plain, root / "fp8", root / "twin")
    return root / "fp8", root / "twin"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_deepseek(tmp_path_factory.mktemp("model"), "deepseek_v3", num_hidden_layers=2)


@pytest.fixture
def copy(model: Path, tmp_path: Path) -> Path:
    """A copy whose files a test may damage."""
    return Path(shutil.copytree(model, tmp_path / "copy"))


def change_config(path: Path, **changes: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def change_tensors(path: Path, changes: dict[str, Tensor | None]) -> None:
    file = path / "model.safetensors"
    content: dict[str, Tensor | None] = {**load_file(file), **changes}
    kept = {name: tensor for name, tensor in content.items() if tensor is not None}
    save_file(kept, file, metadata={"format": "pt"})


def test_fp8_blocks_are_read_as_what_they_stand_for(pair: tuple[Path, Path]) -> None:
    fp8, twin = (OneRank.load(path) for path in pair)
    asked = prompts(3, lengths=(40, 5))
    of_fp8, of_twin = (rank.generate(asked, max_tokens=12) for rank in (fp8, twin))
    for trace, other in zip(of_fp8, of_twin, strict=True):
        assert trace.tokens == other.tokens
        assert torch.equal(torch.stack(trace.logits), torch.stack(other.logits))


def test_a_block_is_decoded_by_its_own_scale() -> None:
    matrix = torch.randn(300, 130, generator=torch.Generator().manual_seed(1))
    stored, scales = to_fp8_blocks(matrix)
    assert scales.shape == (3, 2)
    decoded = Fp8Blocks().decode({"x.weight": stored, "x.weight_scale_inv": scales})
    assert torch.equal(decoded, from_fp8_blocks(stored, scales))
    assert float((decoded - matrix).norm() / matrix.norm()) < 0.03


def test_bytes_are_those_of_the_dtype_it_is_held_in(pair: tuple[Path, Path]) -> None:
    for path in pair:
        arch = load_architecture(path)
        checkpoint = Checkpoint(path, arch)
        assert checkpoint.load_shared().num_bytes == checkpoint.shared_bytes
        expert = checkpoint.read_expert(1, 0)
        assert expert.w13_2IH.nbytes + expert.w2_HI.nbytes == arch.bytes_per_expert


def test_the_gate_is_held_in_float32_whatever_the_rest_is(model: Path) -> None:
    arch = load_architecture(model).held_in("bfloat16")
    layer = Checkpoint(model, arch).load_shared().layers[1]
    assert layer.router is not None
    assert layer.router.gate_EH.dtype == torch.float32
    assert layer.router.selection_bias_E is not None
    assert layer.router.selection_bias_E.dtype == torch.float32
    assert layer.attention["kv_b"].dtype == torch.bfloat16


def test_layers_that_predict_further_ahead_are_not_read(model: Path, copy: Path) -> None:
    change_config(copy, num_nextn_predict_layers=1)
    ahead = {
        f"model.layers.2.{name}": torch.zeros(3) for name in ("eh_proj.weight", "enorm.weight")
    }
    change_tensors(copy, dict(ahead))
    asked = prompts(1, lengths=(12,))
    (got,), (wanted,) = (OneRank.load(path).generate(asked) for path in (copy, model))
    assert torch.equal(torch.stack(got.logits), torch.stack(wanted.logits))


@pytest.mark.parametrize(
    "name",
    [
        EXPERT,
        KV_B,
        "model.layers.1.mlp.gate.e_score_correction_bias",
        "model.layers.1.mlp.shared_experts.down_proj.weight",
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.1.self_attn.q_a_layernorm.weight",
    ],
)
def test_a_missing_tensor_is_refused_by_name(copy: Path, name: str) -> None:
    change_tensors(copy, {name: None})
    with pytest.raises(ModelUnreadable, match=name.replace(".", r"\.") + " is missing"):
        Checkpoint(copy, load_architecture(copy))


def test_a_tensor_of_another_shape_is_refused_by_name(copy: Path) -> None:
    change_tensors(copy, {KV_B: torch.zeros(4, 32)})
    with pytest.raises(ModelUnreadable, match=r"kv_b_proj\.weight has shape \[4, 32\]"):
        Checkpoint(copy, load_architecture(copy))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (f"{EXPERT}_scale_inv", None, r"up_proj\.weight_scale_inv is missing"),
        (f"{EXPERT}_scale_inv", torch.zeros(1, 2), r"weight_scale_inv has shape \[1, 2\]"),
        (f"{EXPERT}_scale_inv", torch.zeros(2, 2).half(), "weight_scale_inv has dtype F16"),
        (EXPERT, torch.zeros(136, 192), r"up_proj\.weight has dtype F32; readable: F8_E4M3"),
    ],
)
def test_fp8_files_that_do_not_belong_together_are_refused(
    pair: tuple[Path, Path], tmp_path: Path, name: str, value: Tensor | None, message: str
) -> None:
    path = Path(shutil.copytree(pair[0], tmp_path / "copy"))
    change_tensors(path, {name: value})
    with pytest.raises(ModelUnreadable, match=message):
        Checkpoint(path, load_architecture(path))


def test_modules_that_are_left_plain_are_read_plain(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    fp8, twin = pair
    path = Path(shutil.copytree(fp8, tmp_path / "copy"))
    method = json.loads((path / "config.json").read_text())["quantization_config"]
    plain = KV_B.removesuffix(".weight")
    change_config(path, quantization_config={**method, "modules_to_not_convert": [plain, "o_proj"]})
    decoded = load_file(twin / "model.safetensors")
    changes: dict[str, Tensor | None] = {}
    for name in (KV_B, *(f"model.layers.{i}.self_attn.o_proj.weight" for i in range(2))):
        changes |= {name: decoded[name], f"{name}_scale_inv": None}
    change_tensors(path, changes)
    asked = prompts(3, lengths=(12,))
    (got,), (wanted,) = (OneRank.load(each).generate(asked) for each in (path, twin))
    assert torch.equal(torch.stack(got.logits), torch.stack(wanted.logits))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"topk_method": "greedy"}, "topk_method 'greedy' is not supported; only 'noaux_tc'"),
        ({"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported; only 'sigmoid'"),
        ({"num_key_value_heads": 2}, "num_key_value_heads 2 is not supported; only 4"),
        ({"kv_lora_rank": 0}, "kv_lora_rank must be a positive integer, got 0"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace must be a number of layers, got -1"),
        ({"moe_layer_freq": 2}, "moe_layer_freq 2 is not supported; only 1"),
        ({"n_group": 3}, "n_group 3 does not divide the 8 experts"),
        ({"topk_group": 1}, "num_experts_per_tok 3 of the 2 experts that topk_group 1 leaves"),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method 'awq' is not supported"),
        (
            {"quantization_config": {"quant_method": "fp8", "fmt": "e5m2"}},
            "fmt 'e5m2' is not supported",
        ),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}},
            "weight_block_size must be two positive integers",
        ),
    ],
)
def test_what_it_cannot_be_is_refused_by_field(
    copy: Path, changes: dict[str, Any], message: str
) -> None:
    change_config(copy, **changes)
    with pytest.raises(ModelUnreadable, match=message.replace("[", r"\[")):
        load_architecture(copy)


def test_a_model_of_dense_layers_only_has_no_experts(copy: Path) -> None:
    change_config(copy, first_k_dense_replace=2)
    with pytest.raises(ModelHasNoExperts, match="none of the 2 layers has experts"):
        load_architecture(copy)


def test_yarn_moves_the_scale_of_the_scores(copy: Path) -> None:
    """DeepSeek-V3's own numbers: 0.1 · ln 40 + 1, squared, over √192."""
    yarn = {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}  # fmt: skip
    change_config(
        copy, rope_parameters=None, rope_scaling=yarn, rope_theta=10000, qk_nope_head_dim=128,
        qk_rope_head_dim=64,
    )  # fmt: skip
    attention = load_architecture(copy).attention
    assert isinstance(attention, LatentSpec)
    assert attention.scale == pytest.approx(0.1352337788608801, rel=1e-12)
