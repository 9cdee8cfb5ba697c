"""How a worker serves: experts, router, KV cache, scheduler, API limits. A change of it rolls the
pods.

Neighbours: `workload` (the pod around it), `policy` (what never touches a running pod);
`deployment` joins them. The operator turns these blocks into a `worker.WorkerConfig`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from moe_api.block import SET, Block, CelRule, SecretKeyRef
from moe_api.workload import MAX_RANKS, FilePath


class Offload(Block):
    """Keep experts in host memory and only some on the device."""

    RULES = (
        CelRule(
            cel="!self.enabled || has(self.deviceSlotsPerLayer)",
            holds=lambda offload: not offload.enabled or offload.device_slots_per_layer is not None,
            message="experts.offload.enabled is true without deviceSlotsPerLayer: "
            "set experts.offload.deviceSlotsPerLayer, at least the model's top-k",
        ),
    )

    enabled: bool = False
    """Hold experts in host memory and cache some on the device."""
    device_slots_per_layer: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Experts of a layer that fit on the device at once; at least the model's top-k."""
    prefetch: bool = True
    """Copy the experts that the next layer will probably choose before it asks."""


class Experts(Block):
    """Room for experts and their copies on each rank."""

    RULES = (
        CelRule(
            cel="!(has(self.slotsPerRank) && has(self.redundantSlotsPerRank))",
            holds=lambda experts: (
                experts.slots_per_rank is None or experts.redundant_slots_per_rank is None
            ),
            message="experts.slotsPerRank and experts.redundantSlotsPerRank are both given: "
            "remove one, slotsPerRank counts all slots and redundantSlotsPerRank the extra ones",
            explain="experts.slotsPerRank %d and experts.redundantSlotsPerRank %d are both given: "
            "remove one, slotsPerRank counts all slots and redundantSlotsPerRank the extra ones",
            values=("slotsPerRank", "redundantSlotsPerRank"),
        ),
        CelRule(
            cel="!has(self.maxReplicas) || self.minReplicas <= self.maxReplicas",
            holds=lambda experts: (
                experts.max_replicas is None or experts.min_replicas <= experts.max_replicas
            ),
            message="experts.minReplicas is more than experts.maxReplicas: "
            "lower minReplicas or raise maxReplicas",
            explain="experts.minReplicas %d is more than experts.maxReplicas %d: "
            "lower minReplicas or raise maxReplicas",
            values=("minReplicas", "maxReplicas"),
        ),
    )

    slots_per_rank: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Serving slots on each rank in each layer; together they must hold every expert."""
    redundant_slots_per_rank: Annotated[int, Field(ge=0, le=64)] | None = None
    """Serving slots beyond experts divided by ranks, rounded up; 1 when neither field is given."""
    spare_slots_per_rank: Annotated[int, Field(ge=0, le=8)] = 1
    """Extra slots into which weights are copied while serving; 0 leaves only unfilled slots."""
    min_replicas: Annotated[int, Field(ge=1, le=MAX_RANKS)] = 1
    """Copies every expert has at least."""
    max_replicas: Annotated[int, Field(ge=1, le=MAX_RANKS)] | None = None
    """Copies an expert has at most; when absent, one on each rank."""
    offload: Offload = Offload()
    """Experts in host memory."""


OverflowAction = Literal["Replica", "Spill", "Reroute", "Drop"]
DEFAULT_OVERFLOW: tuple[OverflowAction, ...] = ("Replica", "Spill")


class BiasBalancing(Block):
    """Balance by a bias on the router's scores, which changes what a served model answers."""

    enabled: bool = False
    """Let a per-expert bias steer tokens away from hot experts."""
    rate: Annotated[float, Field(ge=0.000001, le=1)] = 0.001
    """Change of an expert's bias in one update."""
    max_bias: Annotated[float, Field(ge=0, le=100)] = 0.1
    """Largest bias, either way, in units of the router's scores."""


class Router(Block):
    """How tokens choose experts when one is overrun."""

    capacity_factor: Annotated[float, Field(ge=0.1, le=100)] | None = None
    """Tokens an expert takes relative to an even split; when absent, as many as come."""
    overflow: Annotated[list[OverflowAction], Field(max_length=4, json_schema_extra=SET)] = Field(
        default_factory=lambda: list(DEFAULT_OVERFLOW)
    )
    """What is tried, in this order, with tokens beyond the capacity."""
    bias_balancing: BiasBalancing = BiasBalancing()
    """Balance by a bias on the router's scores."""


class KvCache(Block):
    """The cache of keys and values."""

    RULES = (
        CelRule(
            cel="!(has(self.memoryFraction) && has(self.blocks))",
            holds=lambda kv: kv.memory_fraction is None or kv.blocks is None,
            message="kvCache.memoryFraction and kvCache.blocks are both given: "
            "remove one, both set the size of the cache",
            explain="kvCache.memoryFraction %s and kvCache.blocks %d are both given: "
            "remove one, both set the size of the cache",
            values=("memoryFraction", "blocks"),
        ),
        CelRule(
            cel="self.encoding == 'Standard' || self.dtype in ['nvfp4', 'k8v4']",
            holds=lambda kv: kv.encoding == "Standard" or kv.dtype in ("nvfp4", "k8v4"),
            message="kvCache.encoding chooses the scales of NVFP4 blocks, which kvCache.dtype does "
            "not have: set dtype nvfp4 or k8v4, or encoding Standard",
            explain="kvCache.encoding %s chooses the scales of NVFP4 blocks, which "
            "kvCache.dtype %s does not have: set dtype nvfp4 or k8v4, or encoding Standard",
            values=("encoding", "dtype"),
        ),
        CelRule(
            cel="self.keyScaling == 'None' || has(self.scalesFile)",
            holds=lambda kv: kv.key_scaling == "None" or kv.scales_file is not None,
            message="kvCache.keyScaling is set without kvCache.scalesFile: "
            "set scalesFile, nothing is calibrated while serving",
            explain="kvCache.keyScaling is %s without kvCache.scalesFile: "
            "set scalesFile, nothing is calibrated while serving",
            values=("keyScaling",),
        ),
        CelRule(
            cel="!has(self.scalesFile) || self.dtype in ['fp8', 'k8v4', 'nvfp4'] || "
            "(self.dtype == 'mxfp4' && self.keyScaling != 'None')",
            holds=lambda kv: (
                kv.scales_file is None
                or kv.dtype in ("fp8", "k8v4", "nvfp4")
                or (kv.dtype == "mxfp4" and kv.key_scaling != "None")
            ),
            message="kvCache.scalesFile has no effect with this kvCache.dtype and keyScaling: "
            "remove it, or set dtype fp8, k8v4 or nvfp4",
            explain="kvCache.scalesFile has no effect with kvCache.dtype %s and keyScaling %s: "
            "remove it, or set dtype fp8, k8v4 or nvfp4",
            values=("dtype", "keyScaling"),
        ),
        CelRule(
            cel="!has(self.scalesFile) || "
            "(!self.scalesFile.startsWith('/') && !self.scalesFile.matches('(^|/)[.][.](/|$)'))",
            holds=lambda kv: kv.scales_file is None or _lies_below(kv.scales_file),
            message="kvCache.scalesFile does not lie below the model's folder: "
            "write a relative path without '..'",
            explain="kvCache.scalesFile %s does not lie below the model's folder: "
            "write a relative path without '..'",
            values=("scalesFile",),
        ),
    )

    dtype: Literal["auto", "fp32", "bf16", "fp8", "k8v4", "nvfp4", "mxfp4"] = "nvfp4"
    """Format of stored keys and values; auto takes the model's."""
    encoding: Literal["Standard", "FourOverSix"] = "Standard"
    """How scales of NVFP4 blocks are chosen: FourOverSix tries two and keeps the nearer, as fast to
    read."""
    key_scaling: Literal["None", "Center", "Channel"] = "None"
    """Treatment of keys before they are quantised, with what scalesFile says of each channel:
    subtract its mean (Center) or divide by its size (Channel)."""
    scales_file: FilePath | None = None
    """File with calibrated scales of every layer, below the model's folder; replaces fixed ones."""
    block_size: Literal[16, 32, 64] = 16
    """Tokens in a block."""
    memory_fraction: Annotated[float, Field(ge=0.05, le=0.95)] | None = None
    """Share of the memory left after weights that blocks may fill; 0.85 without this and blocks."""
    blocks: Annotated[int, Field(ge=1, le=16_777_216)] | None = None
    """Number of blocks, instead of a share of memory."""
    prefix_caching: bool = True
    """Keep blocks of finished prompts for later requests that begin alike."""


def _lies_below(path: str) -> bool:
    return not path.startswith("/") and ".." not in path.split("/")


class Scheduler(Block):
    """What a rank runs at once."""

    RULES = (
        CelRule(
            cel="self.maxBatchedTokens >= self.maxRunning",
            holds=lambda scheduler: scheduler.max_batched_tokens >= scheduler.max_running,
            message="scheduler.maxBatchedTokens is less than scheduler.maxRunning: "
            "raise maxBatchedTokens or lower maxRunning, each sequence needs a token a step",
            explain="scheduler.maxBatchedTokens %d is less than scheduler.maxRunning %d: "
            "raise maxBatchedTokens or lower maxRunning, each sequence needs a token a step",
            values=("maxBatchedTokens", "maxRunning"),
        ),
    )

    max_running: Annotated[int, Field(ge=1, le=4096)] = 64
    """Sequences a rank runs at once."""
    max_batched_tokens: Annotated[int, Field(ge=16, le=131_072)] = 2048
    """Tokens a rank computes in one step, prompts and answers together."""
    max_queued: Annotated[int, Field(ge=0, le=100_000)] = 256
    """Requests that wait on a rank; more are answered 429 with Retry-After."""


class Api(Block):
    """Limits of the public API."""

    key_secret_ref: SecretKeyRef | None = None
    """Key that clients must send; when absent, the API is open inside the cluster."""
    max_body_bytes: Annotated[int, Field(ge=1024, le=67_108_864)] = 4_194_304
    """Largest request body."""
    max_stop_strings: Annotated[int, Field(ge=0, le=64)] = 16
    """Stop strings in one request."""
    max_choices: Annotated[int, Field(ge=1, le=64)] = 8
    """Answers to one request."""
