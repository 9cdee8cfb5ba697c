"""Run one step: schedule → tensors → model → tokens. It changes no sequence.

Only the KV cache is written, and running the same schedule again writes the same values; so a step
that failed half-way is simply run again. Neighbours: `batch`, `sampler`, the transformer.
"""

from __future__ import annotations

from torch import Tensor

from moe_worker.engine.batch import build_batch
from moe_worker.engine.kv import KvCache
from moe_worker.engine.logit_rows import logit_rows
from moe_worker.engine.sampler import Draws, draw
from moe_worker.engine.schedule import Schedule
from moe_worker.model.transformer import Moe, Transformer


class Runner:
    def __init__(self, transformer: Transformer, kv: KvCache) -> None:
        self.transformer = transformer
        self.kv = kv
        self._device = transformer.shared.embedding_VH.device
        self.last_logits: Tensor | None = None
        """Float32 [sampled, V] of the newest step, in the schedule's order."""
        self.draws = Draws()
        """What the newest step gave its requests."""

    def run(self, schedule: Schedule, moe: Moe) -> dict[str, int]:
        """The next token of every sequence that samples, by request id; `draws` has the rest.

        With an empty schedule the model still calls `moe` for every layer, with no tokens.
        """
        self.kv.copy_blocks(schedule.copies)
        if schedule.entries:
            self.kv.begin_step()
        batch = build_batch(schedule, self.kv.block_size, self._device)
        logits = self.transformer.forward(batch, self.kv, moe)
        rows = logit_rows(schedule)
        drawing = [index for index, row in enumerate(rows) if row.draws]
        self.last_logits = logits if len(drawing) == len(rows) else logits[drawing]
        self.draws = draw(logits, rows)
        return self.draws.tokens
