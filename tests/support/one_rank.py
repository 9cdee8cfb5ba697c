"""One rank's engine without its thread: scheduler, cache and runner stepped by hand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from moe_api.worker import KvConfig
from moe_worker.engine.blocks import BlockPool
from moe_worker.engine.kv import KvCache
from moe_worker.engine.runner import Runner
from moe_worker.engine.sampling_params import SamplingParams
from moe_worker.engine.scheduler import Scheduler, SchedulerLimits
from moe_worker.engine.sequence import Sequence as Generation
from moe_worker.model.config import ModelSpec, load_architecture
from moe_worker.model.transformer import Transformer
from moe_worker.model.weights import Checkpoint
from tests.support.local_moe import LocalMoe

MAX_STEPS = 20_000


@dataclass
class Trace:
    """What one request got: tokens, and the logits each was drawn from."""

    tokens: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)


@dataclass
class OneRank:
    """A loaded model; every `generate` begins with a fresh scheduler and an empty cache."""

    arch: ModelSpec
    transformer: Transformer
    moe: LocalMoe

    @classmethod
    def load(cls, path: Path, dtype: str = "auto") -> OneRank:
        arch = load_architecture(path).held_in(dtype)
        checkpoint = Checkpoint(path, arch)
        return cls(arch, Transformer(arch, checkpoint.load_shared()), LocalMoe(checkpoint, arch))

    def generate(
        self,
        prompts: Iterable[Sequence[int]],
        *,
        max_tokens: int = 8,
        kv_dtype: Any = "fp32",
        block_size: Any = 16,
        num_blocks: int = 256,
        max_batched_tokens: int = 512,
        max_running: int = 8,
        prefix_caching: bool = True,
        params: SamplingParams | None = None,
    ) -> list[Trace]:
        """Run all prompts to their end in one continuous batch."""
        scheduler, runner = self.engine(
            kv_dtype=kv_dtype,
            block_size=block_size,
            num_blocks=num_blocks,
            max_batched_tokens=max_batched_tokens,
            max_running=min(max_running, max_batched_tokens),
            prefix_caching=prefix_caching,
        )
        params = params or SamplingParams(max_tokens=max_tokens)
        traces: dict[str, Trace] = {}
        for index, prompt in enumerate(prompts):
            traces[f"r{index}"] = Trace()
            scheduler.add(Generation(f"r{index}", tuple(prompt), params))
        run_all(scheduler, runner, self.moe, traces)
        self.num_preemptions = scheduler.num_preemptions
        return list(traces.values())

    def engine(
        self,
        *,
        kv_dtype: Any = "fp32",
        block_size: Any = 16,
        num_blocks: int = 256,
        max_batched_tokens: int = 512,
        max_running: int = 8,
        prefix_caching: bool = True,
    ) -> tuple[Scheduler, Runner]:
        config = KvConfig(dtype=kv_dtype, block_size=block_size)
        limits = SchedulerLimits(
            max_running=max_running,
            max_batched_tokens=max_batched_tokens,
            max_queued=1024,
            max_model_len=self.arch.max_positions,
            block_size=block_size,
            prefix_caching=prefix_caching,
        )
        cache = KvCache.allocate(self.arch, config, num_blocks)
        return Scheduler(limits, BlockPool(num_blocks)), Runner(self.transformer, cache)


def run_all(scheduler: Scheduler, runner: Runner, moe: LocalMoe, traces: dict[str, Trace]) -> None:
    """Step until nothing is left, keeping logits and tokens; the pool must be empty after."""
    for _ in range(MAX_STEPS):
        schedule = scheduler.schedule()
        if not schedule.entries:
            break
        assert schedule.num_tokens <= scheduler.limits.max_batched_tokens
        tokens = runner.run(schedule, moe)
        assert runner.last_logits is not None
        for request_id, logits in zip(tokens, runner.last_logits, strict=True):
            traces[request_id].logits.append(logits.clone())
        running = [entry.seq for entry in schedule.entries]
        scheduler.commit(schedule, tokens)
        scheduler.check_integrity()
        for seq in running:
            traces[seq.request_id].tokens = list(seq.output)
    assert not scheduler.has_work, f"work is left after {MAX_STEPS} steps"
    assert scheduler.blocks.num_used == 0
