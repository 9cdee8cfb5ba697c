"""Reading a checkpoint: the right tensors, only what is asked, and refusals by name."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moe_worker.model.config import ModelUnreadable, load_architecture
from moe_worker.model.weights import Checkpoint
from tests.support.models import save_random_mixtral

EXPERT = "model.layers.1.block_sparse_moe.experts.5"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_mixtral(tmp_path_factory.mktemp("model"), dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def tensors(model: Path) -> dict[str, Tensor]:
    return load_file(model / "model.safetensors")


@pytest.fixture
def copy(model: Path, tmp_path: Path) -> Path:
    """A copy whose files a test may damage."""
    return Path(shutil.copytree(model, tmp_path / "copy"))


def open_checkpoint(path: Path, dtype: str = "auto") -> Checkpoint:
    return Checkpoint(path, load_architecture(path).held_in(dtype))


def rewrite(path: Path, **changes: Tensor | None) -> None:
    file = path / "model.safetensors"
    content = load_file(file)
    for name, tensor in changes.items():
        if tensor is None:
            del content[name]
        else:
            content[name] = tensor
    save_file(content, file, metadata={"format": "pt"})


def test_the_fixture_is_the_hubs_layout(tensors: dict[str, Tensor]) -> None:
    assert f"{EXPERT}.w1.weight" in tensors
    assert "model.layers.0.block_sparse_moe.gate.weight" in tensors


def test_an_expert_is_gate_over_up_and_down(model: Path, tensors: dict[str, Tensor]) -> None:
    expert = open_checkpoint(model).read_expert(1, 5)
    gate, up = tensors[f"{EXPERT}.w1.weight"], tensors[f"{EXPERT}.w3.weight"]
    assert torch.equal(expert.w13_2IH, torch.cat((gate, up)))
    assert torch.equal(expert.w2_HI, tensors[f"{EXPERT}.w2.weight"])
    assert expert.w2_HI.dtype == torch.bfloat16


def test_bytes_per_expert_are_the_bytes_read(model: Path) -> None:
    for dtype in ("auto", "float32"):
        checkpoint = open_checkpoint(model, dtype)
        expert = checkpoint.read_expert(0, 0)
        assert expert.w13_2IH.nbytes + expert.w2_HI.nbytes == checkpoint.bytes_per_expert


def test_shared_weights_are_everything_but_the_experts(
    model: Path, tensors: dict[str, Tensor]
) -> None:
    shared = open_checkpoint(model).load_shared()
    others = [tensor for name, tensor in tensors.items() if ".experts." not in name]
    assert shared.num_bytes == sum(tensor.nbytes for tensor in others)
    stem = "model.layers.1.self_attn"
    qkv = [tensors[f"{stem}.{name}_proj.weight"] for name in "qkv"]
    assert torch.equal(shared.layers[1].attention["qkv"], torch.cat(qkv))
    router = shared.layers[0].router
    assert router is not None
    assert torch.equal(router.gate_EH, tensors["model.layers.0.block_sparse_moe.gate.weight"])


def test_weights_are_converted_to_the_wanted_dtype(model: Path) -> None:
    wide, own = open_checkpoint(model, "float32"), open_checkpoint(model)
    assert wide.load_shared().embedding_VH.dtype == torch.float32
    assert torch.equal(wide.read_expert(0, 3).w2_HI, own.read_expert(0, 3).w2_HI.float())


def test_shards_are_read_through_the_index(tmp_path: Path) -> None:
    one = save_random_mixtral(tmp_path / "one", seed=3)
    many = save_random_mixtral(tmp_path / "many", seed=3, max_shard_size="100KB")
    assert len(list(many.glob("*.safetensors"))) > 2
    for expert in (0, 7):
        a, b = (open_checkpoint(path).read_expert(1, expert) for path in (one, many))
        assert torch.equal(a.w13_2IH, b.w13_2IH)


def test_tied_embeddings_need_no_head(tmp_path: Path) -> None:
    shared = open_checkpoint(save_random_mixtral(tmp_path, tie_embeddings=True)).load_shared()
    assert shared.lm_head_VH is shared.embedding_VH


def test_a_missing_tensor_is_named(copy: Path) -> None:
    rewrite(copy, **{f"{EXPERT}.w3.weight": None})
    with pytest.raises(ModelUnreadable, match=f"tensor {EXPERT}.w3.weight is missing"):
        open_checkpoint(copy)


def test_a_wrong_shape_is_named_with_both_shapes(copy: Path) -> None:
    rewrite(copy, **{f"{EXPERT}.w2.weight": torch.zeros(64, 40)})
    with pytest.raises(
        ModelUnreadable, match=r"w2\.weight has shape \[64, 40\], config.json asks for \[64, 48\]"
    ):
        open_checkpoint(copy)


def test_a_quantised_tensor_is_refused(copy: Path) -> None:
    rewrite(copy, **{f"{EXPERT}.w2.weight": torch.zeros(64, 48, dtype=torch.uint8)})
    with pytest.raises(ModelUnreadable, match="has dtype U8; readable: BF16, F16, F32"):
        open_checkpoint(copy)


def test_a_truncated_file_is_refused(copy: Path) -> None:
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelUnreadable, match=r"cannot read .*model\.safetensors"):
        open_checkpoint(copy)


def test_an_index_that_lies_is_refused(copy: Path) -> None:
    index = copy / "model.safetensors.index.json"
    names = list(load_file(copy / "model.safetensors"))
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "other.safetensors")}))
    with pytest.raises(ModelUnreadable, match=r"cannot read .*other\.safetensors"):
        open_checkpoint(copy)
    save_file({"x": torch.zeros(1)}, copy / "other.safetensors")
    with pytest.raises(ModelUnreadable, match=r"in other\.safetensors, which does not hold it"):
        open_checkpoint(copy)
    index.write_text("[]")
    with pytest.raises(ModelUnreadable, match="holds no weight_map"):
        open_checkpoint(copy)


def test_a_folder_without_weights_is_refused(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    with pytest.raises(ModelUnreadable, match=r"neither model\.safetensors nor"):
        open_checkpoint(copy)


@pytest.mark.parametrize("name", ["../model.safetensors", "sub/../../model.safetensors", "{}"])
def test_an_index_that_leaves_the_folder_is_refused(copy: Path, name: str) -> None:
    """Files of other models must not be read because a checkpoint says so."""
    elsewhere = copy.parent / "model.safetensors"
    shutil.copy(copy / "model.safetensors", elsewhere)
    weights = dict.fromkeys(load_file(elsewhere), name.format(elsewhere))
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    with pytest.raises(ModelUnreadable, match="is not below the model's folder"):
        open_checkpoint(copy)


def test_links_are_followed_as_the_hubs_cache_has_them(copy: Path) -> None:
    file, blob = copy / "model.safetensors", copy.parent / "blob"
    file.rename(blob)
    file.symlink_to(blob)
    open_checkpoint(copy).read_expert(0, 0)
    blob.unlink()
    with pytest.raises(ModelUnreadable, match="holds neither"):
        open_checkpoint(copy)


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_a_shard_that_is_no_file_is_refused(copy: Path, make: Callable[[Path], None]) -> None:
    weights = dict.fromkeys(load_file(copy / "model.safetensors"), "shard.safetensors")
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    make(copy / "shard.safetensors")
    with pytest.raises(ModelUnreadable, match=r"shard\.safetensors: it is no regular file"):
        open_checkpoint(copy)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_json_without_end_is_refused(copy: Path, name: str) -> None:
    (copy / name).write_text('{"weight_map":' * 100_000)
    with pytest.raises(ModelUnreadable, match=name):
        open_checkpoint(copy)
