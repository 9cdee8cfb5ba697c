"""How many KV blocks fit, computed and refused in numbers before anything is allocated.

Pure. Neighbours: `loading` knows what else takes memory, `kv` allocates what is planned here,
`moe_worker.model.kv_layout` says the bytes of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moe_api.worker import KvConfig
from moe_worker.model.kv_layout import kv_bytes_per_token
from moe_worker.model.spec import ModelSpec


class KvDoesNotFit(ValueError):
    """The cache that was asked for and the memory there is do not go together."""


@dataclass(frozen=True)
class KvSize:
    num_blocks: int
    max_model_len: int
    """Longest sequence served: what was asked for, or what model and cache allow."""
    bytes_per_block: int


@dataclass(frozen=True)
class Memory:
    """What the process may use, and what it needs besides the cache."""

    limit_bytes: int
    reserved_bytes: int
    """Weights, slots, exchange buffers, activations."""
    scratch_bytes: Callable[[int], int] = lambda longest: 0
    """Attention's, while sequences have up to so many tokens; it does not fall with them."""

    def left(self, fraction: float, longest: int) -> int:
        """Bytes for blocks when sequences may have `longest` tokens; negative when none."""
        return int(self.limit_bytes * fraction) - self.reserved_bytes - self.scratch_bytes(longest)


def plan_blocks(
    model: ModelSpec,
    config: KvConfig,
    memory: Memory,
    *,
    max_running: int,
    max_model_len: int | None,
) -> KvSize:
    """Blocks that fit limit · memory_fraction less what else is needed, and the length they allow.

    Never more blocks than `max_running` sequences of the longest length could fill. Without
    `max_model_len` a model whose positions do not all fit is served as far as they do.

    Raises:
        KvDoesNotFit: naming the numbers and the way out.
        KvFormatError: the format cannot hold the model's keys and values.
    """
    longest = max_model_len or model.max_positions
    if longest > model.max_positions:
        raise KvDoesNotFit(
            f"model.maxModelLen {longest} exceeds the model's {model.max_positions} positions"
        )
    size, per_block = config.block_size, kv_bytes_per_token(model, config) * config.block_size

    def fitting(length: int) -> int:
        return max(0, memory.left(config.memory_fraction, length) // per_block)

    if config.blocks is not None:
        longest = min(longest, config.blocks * size) if max_model_len is None else longest
        if config.blocks > fitting(longest):
            raise KvDoesNotFit(
                f"kvCache.blocks {config.blocks} need {config.blocks * per_block} bytes "
                f"({per_block} each), {_left(memory, config, longest)}; give fewer blocks, a "
                "smaller kvCache.dtype or more memory"
            )
        num_blocks = config.blocks
    else:
        if max_model_len is None:
            longest = _longest_that_fits(longest, size, fitting)
        num_blocks = min(fitting(longest), max_running * -(-longest // size))
    needed = -(-longest // size) if max_model_len else 1
    if num_blocks < needed:
        raise KvDoesNotFit(
            f"the KV cache has {num_blocks} blocks of {size} tokens, at least {needed} are needed "
            f"({per_block} bytes each, model.maxModelLen {max_model_len}); "
            f"{_left(memory, config, longest)}; give more memory, a shorter maxModelLen or a "
            "smaller kvCache.dtype"
        )
    return KvSize(num_blocks, min(longest, num_blocks * size), per_block)


def _longest_that_fits(longest: int, block_size: int, fitting: Callable[[int], int]) -> int:
    """The longest sequence up to `longest` whose blocks fit beside its scratch; at least 1."""
    if fitting(longest) * block_size >= longest:
        return longest
    fits, too_long = 0, -(-longest // block_size)  # in blocks
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        if fitting(middle * block_size) >= middle:
            fits = middle
        else:
            too_long = middle
    return max(1, fits * block_size)


def _left(memory: Memory, config: KvConfig, longest: int) -> str:
    left = max(0, memory.left(config.memory_fraction, longest))
    return (
        f"{left} bytes are free: {config.memory_fraction:g} of {memory.limit_bytes} less "
        f"{memory.reserved_bytes} for weights and buffers and {memory.scratch_bytes(longest)} for "
        f"attention over {longest} tokens"
    )
