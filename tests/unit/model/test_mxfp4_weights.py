"""MXFP4 as checkpoints store it; the oracle is the dequantisation of `transformers`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from moe_worker.model.config import ModelUnreadable, load_architecture
from moe_worker.model.mxfp4 import Mxfp4
from moe_worker.model.weights import Checkpoint
from tests.support.gpt_oss_models import save_mxfp4_twins

NAME = "model.layers.0.mlp.experts.down_proj"


def decoded(blocks: Tensor, scales: Tensor) -> Tensor:
    return Mxfp4().decode({f"{NAME}_blocks": blocks, f"{NAME}_scales": scales})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_byte_and_scale_is_theirs(dtype: torch.dtype) -> None:
    """One expert of 255 rows, a scale each, with every byte in it; −0 keeps its sign."""
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).repeat(1, 255, 1, 1)
    scales = torch.arange(255, dtype=torch.uint8).view(1, 255, 1).repeat(1, 1, 16)
    ours = decoded(blocks[0], scales[0])
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=dtype)[0].T.to(torch.float32)
    assert ours.shape == (255, 512)
    assert torch.equal(ours.view(torch.int32), theirs.contiguous().view(torch.int32))


def test_a_scale_that_is_no_number_is_refused() -> None:
    scales = torch.full((3, 2), 127, dtype=torch.uint8)
    scales[2, 1] = 255
    with pytest.raises(ModelUnreadable, match=rf"tensor {NAME}_scales holds the scale 255"):
        decoded(torch.zeros(3, 2, 16, dtype=torch.uint8), scales)


def test_the_files_tensors_are_blocks_and_scales() -> None:
    blocks, scales = Mxfp4().raws(NAME, (32, 2880, 5760))
    assert (blocks.name, blocks.shape) == (f"{NAME}_blocks", (32, 2880, 180, 16))
    assert (scales.name, scales.shape) == (f"{NAME}_scales", (32, 2880, 180))
    assert blocks.dtypes == scales.dtypes == {"U8"}
    assert blocks.sliced
    assert scales.sliced


def test_rows_that_are_not_whole_blocks_are_refused() -> None:
    with pytest.raises(ModelUnreadable, match=f"{NAME}: rows of 90 elements cannot be MXFP4"):
        Mxfp4().raws(NAME, (8, 64, 90))


class Watched:
    """A file that tells which parts of its tensors are read."""

    def __init__(self, file: Any, reads: list[tuple[str, object]]) -> None:
        self.file, self.reads, self.name = file, reads, ""

    def get_tensor(self, name: str) -> Tensor:
        self.reads.append((name, None))
        tensor: Tensor = self.file.get_tensor(name)
        return tensor

    def get_slice(self, name: str) -> Watched:
        watched = Watched(self.file.get_slice(name), self.reads)
        watched.name = name
        return watched

    def __getitem__(self, index: object) -> Tensor:
        self.reads.append((self.name, index))
        tensor: Tensor = self.file[index]
        return tensor


def test_of_all_experts_only_the_one_asked_for_is_read(tmp_path: Path) -> None:
    save_mxfp4_twins(tmp_path / "packed", tmp_path / "floats")
    for path, parts in (("packed", ("_blocks", "_scales")), ("floats", ("",))):
        checkpoint = Checkpoint(tmp_path / path, load_architecture(tmp_path / path))
        reads: list[tuple[str, object]] = []
        checkpoint._files = {name: Watched(file, reads) for name, file in checkpoint._files.items()}
        checkpoint.read_expert(1, 6)
        stem = "model.layers.1.mlp.experts"
        names = [
            f"{stem}.{matrix}{part}"
            for matrix in ("gate_up_proj", "down_proj")
            for part in (*parts, "_bias")
        ]
        assert sorted(reads, key=str) == sorted(((name, 6) for name in names), key=str)
