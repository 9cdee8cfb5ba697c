"""From a spec to what a worker is told in its mounted file, and where its model lies.

Pure. Neighbours: `pod_manifest` mounts what `ModelSource` says, `children` writes the ConfigMap.
"""

from __future__ import annotations

import posixpath
from dataclasses import dataclass

from moe_api import names
from moe_api.deployment import MoEDeploymentSpec, memory_fraction
from moe_api.worker import ApiLimits, KvConfig, ModelConfig, SchedulerConfig, WorkerConfig

MODEL_MOUNT_DIR = "/models"
"""Where a claim with the model appears in the worker."""


class ModelSourceUnsupported(ValueError):
    """A model source that this version cannot load from; the message names the ways that work."""


@dataclass(frozen=True)
class ModelSource:
    path: str
    """Folder in the worker's file system."""
    claim: str | None = None
    """PersistentVolumeClaim to mount at MODEL_MOUNT_DIR."""


def model_source(uri: str) -> ModelSource:
    """Where the worker finds the model.

    Raises:
        ModelSourceUnsupported: any scheme but file:// and pvc://.
    """
    scheme, _, rest = uri.partition("://")
    if scheme == "file":
        return ModelSource(path=posixpath.normpath(rest))
    if scheme == "pvc":
        claim, _, folder = rest.partition("/")
        return ModelSource(posixpath.normpath(posixpath.join(MODEL_MOUNT_DIR, folder)), claim)
    raise ModelSourceUnsupported(
        f"spec.model.uri {uri}: {scheme}:// is not supported by this version, "
        "use file:///path (in the image or a mount) or pvc://claim/path"
    )


def worker_config(name: str, spec: MoEDeploymentSpec) -> WorkerConfig:
    """What every worker of the deployment `name` is told; nothing about ranks.

    `spec` is the honoured one: it asks for nothing that a worker cannot do.

    Raises:
        ModelSourceUnsupported: see `model_source`.
    """
    kv = spec.kv_cache
    return WorkerConfig.model_validate(
        {
            "model": ModelConfig(
                path=model_source(spec.model.uri).path,
                served_name=spec.model.served_name or name,
                dtype=spec.model.dtype,
                max_model_len=spec.model.max_model_len,
            ),
            "kv": KvConfig.model_validate(
                {
                    "dtype": kv.dtype,
                    "encoding": kv.encoding,
                    "keyScaling": kv.key_scaling,
                    "scalesFile": kv.scales_file,
                    "blockSize": kv.block_size,
                    "memoryFraction": memory_fraction(kv) or KvConfig().memory_fraction,
                    "blocks": kv.blocks,
                    "prefixCaching": kv.prefix_caching,
                }
            ),
            "scheduler": SchedulerConfig(
                max_running=spec.scheduler.max_running,
                max_batched_tokens=spec.scheduler.max_batched_tokens,
                max_queued=spec.scheduler.max_queued,
            ),
            "api": ApiLimits(
                max_body_bytes=spec.api.max_body_bytes,
                max_stop_strings=spec.api.max_stop_strings,
                max_choices=spec.api.max_choices,
                key_file=_key_file(spec),
            ),
            "device": "cpu" if spec.worker.accelerator is None else "cuda",
            "kernels": spec.worker.kernels,
            "batchInvariant": spec.worker.batch_invariant,
            "drainSeconds": spec.disruption.drain_seconds,
        }
    )


def _key_file(spec: MoEDeploymentSpec) -> str | None:
    if spec.api.key_secret_ref is None:
        return None
    return posixpath.join(names.API_KEY_DIR, names.API_KEY_FILE)
