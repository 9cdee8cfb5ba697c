"""Everything that a rank allocates, once, when the first plan tells how many slots it has.

In this order, so that what must fit is counted before the cache takes the rest: shared weights,
expert slots, exchange buffers, KV blocks. Neighbours: `preparation` calls it and then fills the
slots; the engine steps with the result.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_api.plan import SlotsLRS
from moe_api.worker import WorkerConfig
from moe_worker.engine.blocks import BlockPool
from moe_worker.engine.kv import KvCache, plan_blocks
from moe_worker.engine.runner import Runner
from moe_worker.engine.scheduler import Scheduler, SchedulerLimits
from moe_worker.expert.bank import ExpertBank
from moe_worker.expert.dispatch import DispatchShape, buffer_bytes
from moe_worker.expert.layer import ExpertLayers
from moe_worker.expert.load import LoadCounters
from moe_worker.model.config import ModelArchitecture
from moe_worker.model.transformer import Transformer
from moe_worker.model.weights import Checkpoint

SCRATCH_BYTES_PER_TOKEN_AND_HIDDEN = 4 * 16
"""Activations of a step: some sixteen float32 rows of the hidden size are alive at a time."""
PROCESS_BYTES = 512 << 20
"""Interpreter and libraries."""


@dataclass(frozen=True)
class Loaded:
    runner: Runner
    scheduler: Scheduler
    bank: ExpertBank
    counters: LoadCounters
    layers: ExpertLayers
    max_model_len: int


def load(
    config: WorkerConfig,
    arch: ModelArchitecture,
    checkpoint: Checkpoint,
    slots_LRS: SlotsLRS,
    member: int,
    memory_bytes: int,
    tokens_per_round: int,
) -> Loaded:
    """Shared weights read, slots and cache allocated; no expert is loaded yet.

    Raises:
        KvDoesNotFit: the cache and the memory do not go together, with the numbers.
        ModelUnreadable, OSError: the checkpoint cannot be read.
    """
    num_layers, num_ranks, num_slots = slots_LRS.shape
    shared = checkpoint.load_shared(config.device)
    bank = ExpertBank(
        num_layers, num_slots, arch.intermediate, arch.hidden, checkpoint.dtype, config.device
    )
    shape = dispatch_shape(arch, checkpoint, num_slots, tokens_per_round)
    reserved_bytes = (
        shared.num_bytes
        + num_layers * num_slots * bank.bytes_per_expert
        + buffer_bytes(shape, num_ranks)
        + config.scheduler.max_batched_tokens * arch.hidden * SCRATCH_BYTES_PER_TOKEN_AND_HIDDEN
        + (PROCESS_BYTES if config.device == "cpu" else 0)
    )
    size = plan_blocks(
        arch,
        config.kv,
        memory_bytes=memory_bytes,
        reserved_bytes=reserved_bytes,
        max_running=config.scheduler.max_running,
        max_model_len=config.model.max_model_len,
    )
    cache = KvCache.allocate(arch, config.kv, size.num_blocks, config.device)
    limits = SchedulerLimits(
        max_running=config.scheduler.max_running,
        max_batched_tokens=config.scheduler.max_batched_tokens,
        max_queued=config.scheduler.max_queued,
        max_model_len=size.max_model_len,
        block_size=config.kv.block_size,
    )
    counters = LoadCounters(num_layers, arch.num_experts, num_slots)
    return Loaded(
        runner=Runner(Transformer(arch, shared), cache),
        scheduler=Scheduler(limits, BlockPool(size.num_blocks)),
        bank=bank,
        counters=counters,
        layers=ExpertLayers(bank, counters, arch.top_k, arch.router.renorm, shift=member),
        max_model_len=size.max_model_len,
    )


def dispatch_shape(
    arch: ModelArchitecture, checkpoint: Checkpoint, num_slots: int, tokens_per_round: int
) -> DispatchShape:
    return DispatchShape(arch.hidden, arch.top_k, num_slots, checkpoint.dtype, tokens_per_round)
