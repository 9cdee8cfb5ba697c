"""Each family's checkpoint: every tensor of it is known, a rank reads what it holds and no more,
and what is missing or wrong is refused by name."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from moe_worker.model.config import ModelUnreadable, load_architecture
from moe_worker.model.families.registry import family_of
from moe_worker.model.tensors import Stored
from moe_worker.model.weights import Checkpoint
from tests.support.family_models import CLASSES, save_family

FILE = "model.safetensors"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: save_family(root / family, family) for family in CLASSES}


@pytest.fixture(params=CLASSES)
def model(request: pytest.FixtureRequest, models: dict[str, Path]) -> Path:
    return models[request.param]


def expected(path: Path) -> list[Stored]:
    """All that the family asks of the checkpoint, each once."""
    spec = load_architecture(path)
    tensors = family_of(spec.family).tensors(spec)
    found = tensors.shared()
    for layer in spec.moe_layers:
        roles_of = tensors.layers[layer].expert
        assert roles_of is not None
        for expert in range(spec.num_experts):
            found += [stored for pieces in roles_of(expert).values() for stored in pieces]
    return found


def test_every_tensor_of_the_checkpoint_has_its_place(model: Path) -> None:
    """One that is left out would be a part of the model that is not computed."""
    with safe_open(model / FILE, framework="pt") as file:
        names = set(file.keys())
    asked = [raw.name for stored in expected(model) for raw in stored.raws()]
    assert set(asked) == names


def test_a_missing_or_misshaped_tensor_is_named(model: Path, tmp_path: Path) -> None:
    """One tensor of every role, in turn."""
    copy = Path(shutil.copytree(model, tmp_path / "copy"))
    content = load_file(model / FILE)
    roles = {"".join(c for c in name if not c.isdigit()): name for name in content}
    assert len(roles) >= 9
    for name in roles.values():
        without = {key: tensor for key, tensor in content.items() if key != name}
        save_file(without, copy / FILE, metadata={"format": "pt"})
        with pytest.raises(ModelUnreadable, match=f"tensor {name} is missing"):
            Checkpoint(copy, load_architecture(copy))
        longer = torch.zeros(content[name].shape[0] + 1, *content[name].shape[1:])
        save_file({**without, name: longer}, copy / FILE, metadata={"format": "pt"})
        with pytest.raises(ModelUnreadable, match=f"tensor {name} has shape .*asks for"):
            Checkpoint(copy, load_architecture(copy))


def test_a_rank_reads_what_it_holds(model: Path) -> None:
    checkpoint = Checkpoint(model, load_architecture(model))
    assert checkpoint.bytes_read == 0
    shared = checkpoint.load_shared()
    assert checkpoint.bytes_read == shared.num_bytes
    layer = checkpoint.arch.moe_layers[-1]
    for expert in (0, 5):
        checkpoint.read_expert(layer, expert)
    assert checkpoint.bytes_read == shared.num_bytes + 2 * checkpoint.bytes_per_expert
    assert checkpoint.bytes_read < checkpoint.num_bytes


def test_shards_hold_the_same_model(model: Path, tmp_path: Path) -> None:
    family = load_architecture(model).family
    sharded = save_family(tmp_path, family, max_shard_size="60KB")
    assert len(list(sharded.glob("*.safetensors"))) > 3
    one, many = (Checkpoint(path, load_architecture(path)) for path in (model, sharded))
    layer = one.arch.moe_layers[0]
    for expert in range(one.arch.num_experts):
        a, b = one.read_expert(layer, expert), many.read_expert(layer, expert)
        assert torch.equal(a.w13_2IH, b.w13_2IH)
        assert torch.equal(a.w2_HI, b.w2_HI)


def test_a_missing_shard_is_named(models: dict[str, Path], tmp_path: Path) -> None:
    sharded = save_family(tmp_path, "qwen3_moe", max_shard_size="60KB")
    lost = sorted(sharded.glob("*.safetensors"))[2]
    lost.unlink()
    with pytest.raises(ModelUnreadable, match=f"cannot read .*{lost.name}"):
        Checkpoint(sharded, load_architecture(sharded))


def test_of_fused_experts_only_the_slices_asked_for_become_resident(tmp_path: Path) -> None:
    """24 MB of experts in two tensors: reading one of 32 touches its pages of the mapped file."""
    path = save_family(
        tmp_path, "granitemoe", num_hidden_layers=1, num_local_experts=32, hidden_size=256,
        intermediate_size=256, vocab_size=64,
    )  # fmt: skip
    checkpoint = Checkpoint(path, load_architecture(path))
    one = checkpoint.bytes_per_expert

    def resident_after(experts: Iterable[int]) -> int:
        for expert in experts:
            weights = checkpoint.read_expert(0, expert)
            assert all(bool(part.any()) for part in (weights.w13_2IH, weights.w2_HI))
        return mapped_bytes(path / FILE)

    # A page fault may bring its neighbours, up to 2 MiB on systems with large pages.
    assert one <= resident_after([17]) < one + 4 * (2 << 20)
    assert resident_after(range(32)) >= 32 * one


def mapped_bytes(file: Path) -> int:
    """Pages of the file that are in this process's memory."""
    total, counting = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        fields = line.split()
        if "-" in fields[0] and not fields[0].endswith(":"):
            counting = fields[-1] == str(file)
        elif counting and fields[0] == "Rss:":
            total += int(fields[1]) * 1024
    return total
