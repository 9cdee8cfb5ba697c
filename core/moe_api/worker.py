"""What operator and worker tell each other besides the plan: WorkerConfig, WorkerState,
DrainRequest.

Neighbours: `plan` (PUT to workers), `load` (read from them). The operator builds a WorkerConfig
from the spec (`moe_operator.worker_config`) and mounts it; `moe_worker.main` reads it at start.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from moe_api.document import Document, Part

Carrier = Literal["tcp", "gloo", "nccl"]
_TRANSPORTS = {"cpu": ("auto", "tcp", "gloo"), "cuda": ("auto", "nccl")}
_KERNELS = {"cpu": ("auto", "cpu", "reference"), "cuda": ("auto", "gpu", "reference")}
Positive = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]


class WorkerPhase(StrEnum):
    WAITING = "Waiting"
    LOADING = "Loading"
    JOINING = "Joining"
    SERVING = "Serving"
    DRAINING = "Draining"
    DISRUPTED = "Disrupted"
    FAILED = "Failed"


class ModelConfig(Part):
    path: str
    """Folder in the worker's file system: hub layout (config.json, safetensors, tokenizer.json)."""
    served_name: str
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    max_model_len: Positive | None = None


class KvConfig(Part):
    dtype: Literal["auto", "fp32", "bf16", "fp8", "k8v4", "nvfp4", "mxfp4"] = "nvfp4"
    encoding: Literal["Standard", "FourOverSix"] = "Standard"
    key_scaling: Literal["None", "Center", "Channel"] = "None"
    scales_file: str | None = None
    """Below the model's folder; needed by key_scaling."""
    block_size: Literal[16, 32, 64] = 16
    memory_fraction: float = Field(default=0.85, ge=0.05, le=0.95)
    blocks: Positive | None = None
    prefix_caching: bool = True


class SchedulerConfig(Part):
    max_running: Positive = 64
    max_batched_tokens: Positive = 2048
    max_queued: Natural = 256


class ApiLimits(Part):
    max_body_bytes: Positive = 4 * 1024 * 1024
    max_stop_strings: Natural = 16
    max_choices: Positive = 8
    key_file: str | None = None
    """File with the keys that clients must send one of; None = the API is open."""


class WorkerConfig(Document):
    """Mounted file; says nothing about ranks. A change of it rolls the pods."""

    model: ModelConfig
    kv: KvConfig = KvConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    api: ApiLimits = ApiLimits()
    device: Literal["cpu", "cuda"] = "cpu"
    transport: Literal["auto", "tcp", "gloo", "nccl"] = "auto"
    """What carries bytes between ranks: on CPUs tcp (auto) or gloo, on GPUs nccl (auto)."""
    kernels: Literal["auto", "reference", "cpu", "gpu"] = "auto"
    """Whose operations compute: auto is the fastest on the device, reference is plain torch."""
    batch_invariant: bool = True
    """A token's numbers depend on its own inputs alone; off allows faster library products."""
    drain_seconds: Natural = 60
    operation_timeout_seconds: float = Field(default=5.0, gt=0, allow_inf_nan=False)
    """Deadline of one agree, dispatch or combine; also the process group's time-out."""

    @model_validator(mode="after")
    def _transport_fits_device(self) -> Self:
        fitting = _TRANSPORTS[self.device]
        if self.transport not in fitting:
            raise ValueError(
                f"transport {self.transport} does not work with device {self.device}, "
                f"use {' or '.join(fitting)}"
            )
        return self

    @model_validator(mode="after")
    def _kernels_fit_device(self) -> Self:
        fitting = _KERNELS[self.device]
        if self.kernels not in fitting:
            raise ValueError(
                f"kernels {self.kernels} do not work with device {self.device}, "
                f"use {' or '.join(fitting)}"
            )
        return self

    @property
    def carrier(self) -> Carrier:
        """The transport in use."""
        if self.transport == "auto":
            return "tcp" if self.device == "cpu" else "nccl"
        return self.transport


class ModelShape(Part):
    """What the model's own files say, reported by the first worker that could read them."""

    layers: int
    """MoE layers."""
    experts: int
    top_k: int
    expert_groups: int | None = None
    """Equal groups of experts of which a token may use only a few; absent = no such rule."""
    bytes_per_expert: int
    kv_bytes_per_token: int


class MigrationState(Part):
    """The newest wave this worker worked on."""

    epoch: int
    bytes: int = 0
    moves_done: int = 0
    moves_total: int = 0
    stall_millis: float | None = None
    """Longest gap between two steps at the switch minus the median gap; set after the switch."""
    error: str | None = None


class KvState(Part):
    """The cache as it was allocated, and what storing tokens in it costs."""

    format: str
    bytes: int
    """Of all blocks and layers."""
    scales: dict[str, list[float]] = Field(default_factory=dict)
    """Global scales in use: per side (key, value or latent, rope) one for each layer. Empty for
    formats without."""
    quantization_errors: list[float | None] = Field(default_factory=list)
    """Per layer, relative L2 error of the newest sample; null before the first."""


class WarmUpState(Part):
    """How far the kernels are that are compiled, or loaded, before this worker can join a group."""

    done: int
    total: int
    step: str
    """Under way now."""


class WorkerState(Document):
    incarnation: str
    member: int
    phase: WorkerPhase
    model: ModelShape | None = None
    warm_up: WarmUpState | None = None
    """Absent once all kernels are ready."""
    generation: int = 0
    applied_epoch: int = 0
    staged_epoch: int = 0
    """Highest epoch whose weights are complete here (≥ applied_epoch)."""
    abandoned_epoch: int = 0
    """Highest epoch that the group agreed to abandon."""
    prepared_generation: int = 0
    """Highest generation whose weights are complete here, so that it may begin."""
    slots: str | None = None
    """Experts held per layer as in LayerPlacement, one rank: layers joined by '|'."""
    migration: MigrationState | None = None
    missing_members: list[int] = Field(default_factory=list)
    """Members that did not come to the rendezvous of `prepared_generation`."""
    suspects: list[int] = Field(default_factory=list)
    """Members that an operation failed on in the present generation."""
    requests_running: int = 0
    requests_waiting: int = 0
    kv_blocks_used: int = 0
    kv_blocks_cached: int = 0
    """Held by no request, with known content: the prefix cache. The rest is free."""
    kv_blocks_total: int = 0
    kv: KvState | None = None
    """Once the cache is allocated."""
    last_error: str | None = None
    error_reason: str | None = None
    """Machine-readable cause when phase is Failed: ModelHasNoExperts, ModelUnreadable,
    KvCacheUnusable (all three no fault of the worker), KvDoesNotFit or an error's name."""


class DrainRequest(Document):
    deadline_seconds: int = Field(default=60, ge=0, le=3600)
