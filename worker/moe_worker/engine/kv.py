"""The paged KV cache of one rank: its blocks, and what storing tokens in them costs.

Allocated once, with the size that `kv_size` planned. Neighbours: `blocks` says who owns a block,
`kv_scales` gives scales that are not the format's, `moe_kernels.kv_pages` is the layout of each
format, `moe_worker.model.kv_layout` says which format.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

import torch

from moe_api.worker import KvConfig
from moe_kernels import kv_pages
from moe_kernels.kv_pages import KvPages, LayerScales
from moe_worker.model.kv_layout import kv_format, kv_shape
from moe_worker.model.spec import ModelSpec

STEPS_PER_SAMPLE = 16
"""Steps between two samples of the quantisation error, each of one layer and a few tokens."""


@dataclass(frozen=True)
class KvCache:
    layers: tuple[KvPages, ...]
    block_size: int
    _steps: Iterator[int] = field(default_factory=count, compare=False, repr=False)

    @classmethod
    def allocate(
        cls,
        arch: ModelSpec,
        config: KvConfig,
        num_blocks: int,
        device: str | torch.device = "cpu",
        scales: Sequence[LayerScales] | None = None,
    ) -> KvCache:
        """Zeroed pages for every layer; `scales` of each layer, absent = the format's own.

        Raises KvFormatError if the format cannot hold them.
        """
        chosen, shape = kv_format(arch, config), kv_shape(arch)
        return cls(
            layers=tuple(
                kv_pages.allocate_pages(
                    chosen, shape, num_blocks, config.block_size, device, of_layer
                )
                for of_layer in scales or [LayerScales()] * arch.num_layers
            ),
            block_size=config.block_size,
        )

    @property
    def num_blocks(self) -> int:
        return self.layers[0].num_blocks

    @property
    def num_bytes(self) -> int:
        return sum(pages.num_bytes for pages in self.layers)

    @property
    def quantization_errors(self) -> list[float | None]:
        """Relative L2 error of each layer's newest sample; None before its first, or not finite."""
        return [pages.probe.relative_error for pages in self.layers]

    @property
    def scales(self) -> dict[str, list[float]]:
        """Global scales in use by side, layer after layer; empty for formats without."""
        of_layers = [pages.global_scales for pages in self.layers]
        # Six digits give back what a file said in decimals; the codes use float32.
        return {
            side: [float(f"{scales[side]:.6g}") for scales in of_layers] for side in of_layers[0]
        }

    def begin_step(self) -> None:
        """Now and then the coming step looks at what quantising costs in one layer, in turn."""
        sample, rest = divmod(next(self._steps), STEPS_PER_SAMPLE)
        if rest == 0:
            self.layers[sample % len(self.layers)].probe.wanted = True

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (from, to), byte by byte, in every layer; no target is a source."""
        if not copies:
            return
        for pages in self.layers:
            for stored in pages.tensors:
                sources, targets = torch.tensor(copies, device=stored.device).unbind(1)
                stored[targets] = stored[sources]
