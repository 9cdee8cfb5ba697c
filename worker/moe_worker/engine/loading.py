"""Everything that a rank allocates, once, when the first plan tells how many slots it has.

All of it is counted first (`memory_plan`), so that what does not fit is refused before anything is
taken, and nothing grows later. Neighbours: `preparation` calls it and then fills the slots; the
engine steps with the result.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from moe_api.plan import SlotsLRS
from moe_kernels.memory import attention_bytes, process_bytes, product_bytes
from moe_worker.engine.blocks import BlockPool
from moe_worker.engine.kv import KvCache
from moe_worker.engine.kv_scales import layer_scales
from moe_worker.engine.kv_size import KvSize, Memory, plan_blocks
from moe_worker.engine.memory import memory_limit_bytes
from moe_worker.engine.runner import Runner
from moe_worker.engine.scheduler import Scheduler, SchedulerLimits
from moe_worker.engine.settings import EngineSettings
from moe_worker.engine.warm_up import WarmUp
from moe_worker.expert.bank import ExpertBank
from moe_worker.expert.dispatch import DispatchShape, buffer_bytes
from moe_worker.expert.layer import ExpertLayers
from moe_worker.expert.load import LoadCounters
from moe_worker.model.spec import LatentSpec, ModelSpec
from moe_worker.model.transformer import Transformer
from moe_worker.model.weights import Checkpoint, ExpertWeights

SCRATCH_BYTES_PER_TOKEN_AND_HIDDEN = 4 * 16
"""Activations of a step: some sixteen float32 rows are alive at a time, of the hidden size or of
all heads' queries if these are wider."""
FLOAT_BYTES = 4
LOGIT_COPIES = 3
"""Of a running sequence's logits, which sampling makes, beside the model's own: a request may want
those of every token of a step."""
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


class Loader:
    """The model's files and what has been loaded of them; `load` works once."""

    def __init__(
        self,
        settings: EngineSettings,
        arch: ModelSpec,
        checkpoint: Checkpoint,
        warm_up: WarmUp,
    ) -> None:
        """Raises KvFormatError or KvScalesUnusable: model and KV options do not go together."""
        self.arch = arch
        self.loaded: Loaded | None = None
        self._settings, self.checkpoint, self._warm_up = settings, checkpoint, warm_up
        self._kv_scales = layer_scales(checkpoint.path, arch, settings.config.kv)
        self._lock = threading.Lock()

    @property
    def credentials(self) -> str:
        """What members must have in common to understand each other's bytes."""
        return (
            f"{self.arch.hidden}/{self.arch.top_k}/{self.checkpoint.dtype}/"
            f"{self._settings.tokens_per_round}"
        )

    def read_expert(self, layer: int, expert: int) -> ExpertWeights:
        """An expert of MoE layer `layer` (ordinal), from the checkpoint."""
        device = self._settings.config.device
        return self.checkpoint.read_expert(self.arch.moe_layers[layer], expert, device)

    def dispatch_shape(self, num_slots: int) -> DispatchShape:
        return DispatchShape(
            self.arch.hidden,
            self.arch.top_k,
            num_slots,
            self.checkpoint.dtype,
            self._settings.tokens_per_round,
        )

    def load(self, slots_LRS: SlotsLRS) -> Loaded:
        """What is loaded, or load it for a plan's slots: shared weights read, slots and cache
        allocated, kernels ready, no expert in them yet.

        Raises:
            Exception: of a kernel that cannot be compiled.
            KvDoesNotFit: the cache and the memory do not go together, with the numbers.
            ModelUnreadable, OSError: the checkpoint cannot be read.
        """
        # A preparation that was called off may still be loading: its successor waits for it.
        with self._lock:
            if self.loaded is None:
                loaded = self._load(*slots_LRS.shape)
                self._warm_up.wait()
                self.loaded = loaded
            return self.loaded

    def _load(self, num_layers: int, num_ranks: int, num_slots: int) -> Loaded:
        arch, config, device = self.arch, self._settings.config, self._settings.config.device
        limits = config.scheduler
        size = self.memory_plan(num_layers, num_ranks, num_slots)
        shared = self.checkpoint.load_shared(device)
        bank = ExpertBank(
            num_layers, num_slots, arch.expert.intermediate, arch.hidden, self.checkpoint.dtype,
            device, arch.expert.bias,
        )  # fmt: skip
        cache = KvCache.allocate(arch, config.kv, size.num_blocks, device, self._kv_scales)
        scheduler = Scheduler(
            SchedulerLimits(
                max_running=limits.max_running,
                max_batched_tokens=limits.max_batched_tokens,
                max_queued=limits.max_queued,
                max_model_len=size.max_model_len,
                block_size=config.kv.block_size,
                prefix_caching=config.kv.prefix_caching,
            ),
            BlockPool(size.num_blocks),
        )
        counters = LoadCounters(num_layers, arch.num_experts, num_slots)
        return Loaded(
            runner=Runner(Transformer(arch, shared, size.max_model_len), cache),
            scheduler=scheduler,
            bank=bank,
            counters=counters,
            layers=ExpertLayers(bank, counters, arch.expert.act),
            max_model_len=size.max_model_len,
        )

    @property
    def _largest_matrix(self) -> int:
        """Its number of elements."""
        arch = self.arch
        rows = max(arch.vocab_size, 2 * arch.expert.intermediate, 2 * arch.dense_intermediate)
        return rows * arch.hidden

    def memory_plan(self, num_layers: int, num_ranks: int, num_slots: int) -> KvSize:
        """What is left for the cache beside everything else; nothing is allocated.

        Raises KvDoesNotFit with the numbers.
        """
        arch, config, limits = self.arch, self._settings.config, self._settings.config.scheduler
        attention = arch.attention
        is_latent = isinstance(attention, LatentSpec)
        vector = attention.kv_elements if is_latent else arch.grouped_query.head_dim
        # With latent attention queries are wider than the hidden states, several times.
        widest = max(arch.hidden, attention.num_heads * vector)
        reserved_bytes = (
            self.checkpoint.shared_bytes
            + num_layers * num_slots * arch.bytes_per_expert
            + buffer_bytes(self.dispatch_shape(num_slots), num_ranks)
            + limits.max_batched_tokens * widest * SCRATCH_BYTES_PER_TOKEN_AND_HIDDEN
            + (limits.max_batched_tokens + LOGIT_COPIES * limits.max_running)
            * (arch.vocab_size * FLOAT_BYTES)
            + product_bytes(self._largest_matrix)
            + process_bytes()
            + (PROCESS_BYTES if config.device == "cpu" else 0)
        )
        return plan_blocks(
            arch,
            config.kv,
            Memory(
                limit_bytes=self._settings.memory_bytes or memory_limit_bytes(),
                reserved_bytes=reserved_bytes,
                scratch_bytes=lambda longest: (
                    attention_bytes(attention.num_heads, vector, attention.kv_elements, longest)
                    + longest * arch.rope.dim * FLOAT_BYTES  # cosines and sines
                ),
            ),
            max_running=limits.max_running,
            max_model_len=config.model.max_model_len,
        )
