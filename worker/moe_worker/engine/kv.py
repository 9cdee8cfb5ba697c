"""The paged KV cache of one rank: how many blocks fit, and their bytes.

The size is computed and refused in numbers before anything is allocated.
Neighbours: `blocks` says who owns a block, `moe_kernels.kv_pages` is the layout and the code of
each format, `moe_worker.model.config` the bytes of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moe_api.worker import KvConfig
from moe_kernels import kv_pages
from moe_kernels.kv_pages import KvPages
from moe_worker.model.config import ModelArchitecture
from moe_worker.model.kv_layout import kv_bytes_per_token, kv_format, kv_shape


class KvDoesNotFit(ValueError):
    """The cache that was asked for and the memory there is do not go together."""


@dataclass(frozen=True)
class KvCache:
    layers: tuple[KvPages, ...]
    block_size: int

    @classmethod
    def allocate(
        cls,
        arch: ModelArchitecture,
        config: KvConfig,
        num_blocks: int,
        device: str | torch.device = "cpu",
    ) -> KvCache:
        """Zeroed pages for every layer. Raises KvFormatError if the format cannot hold them."""
        chosen, shape = kv_format(arch, config), kv_shape(arch)
        return cls(
            layers=tuple(
                kv_pages.allocate_pages(chosen, shape, num_blocks, config.block_size, device)
                for _ in range(arch.num_layers)
            ),
            block_size=config.block_size,
        )

    @property
    def num_blocks(self) -> int:
        return self.layers[0].num_blocks

    @property
    def num_bytes(self) -> int:
        return sum(pages.num_bytes for pages in self.layers)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (from, to), byte by byte, in every layer; no target is a source."""
        if not copies:
            return
        for pages in self.layers:
            for stored in pages.tensors:
                sources, targets = torch.tensor(copies, device=stored.device).unbind(1)
                stored[targets] = stored[sources]


@dataclass(frozen=True)
class KvSize:
    num_blocks: int
    max_model_len: int
    """Longest sequence served: what was asked for, or what model and cache allow."""
    bytes_per_block: int


def plan_blocks(
    arch: ModelArchitecture,
    config: KvConfig,
    *,
    memory_bytes: int,
    reserved_bytes: int,
    max_running: int,
    max_model_len: int | None,
) -> KvSize:
    """Blocks that fit memory_bytes · memory_fraction − reserved_bytes, and the length they allow.

    `memory_bytes` is what the process may use in all, `reserved_bytes` what it needs besides the
    cache (weights, slots, exchange buffers, scratch). Never more blocks than `max_running`
    sequences of the longest length could fill. Raises KvDoesNotFit naming the numbers.
    """
    longest = max_model_len or arch.max_positions
    if longest > arch.max_positions:
        raise KvDoesNotFit(
            f"model.maxModelLen {longest} exceeds the model's {arch.max_positions} positions"
        )
    per_block = kv_bytes_per_token(arch, config) * config.block_size
    usable = int(memory_bytes * config.memory_fraction) - reserved_bytes
    fitting = max(0, usable // per_block)
    useful = max_running * -(-longest // config.block_size)
    num_blocks = min(fitting, useful) if config.blocks is None else config.blocks
    needed = -(-longest // config.block_size) if max_model_len else 1
    if config.blocks is not None and config.blocks > fitting:
        raise KvDoesNotFit(
            f"kvCache.blocks {config.blocks} need {config.blocks * per_block} bytes "
            f"({per_block} each), {max(0, usable)} are free: {config.memory_fraction:g} of "
            f"{memory_bytes} less {reserved_bytes} for weights and buffers; give fewer blocks "
            "or more memory"
        )
    if num_blocks < needed:
        raise KvDoesNotFit(
            f"the KV cache has {num_blocks} blocks of {config.block_size} tokens, at least "
            f"{needed} are needed (model.maxModelLen {max_model_len}); {max(0, usable)} bytes are "
            f"free: {config.memory_fraction:g} of {memory_bytes} less {reserved_bytes} for weights "
            "and buffers; give more memory, a shorter maxModelLen or a smaller kvCache.dtype"
        )
    return KvSize(num_blocks, min(longest, num_blocks * config.block_size), per_block)
