"""Values that make the project's chart run from this checkout: the host's Python instead of images.

Demo and cluster tests install the same chart that users install; only what an image would bring
comes from the host (`overlay`). The tiny model appears where the worker image has it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from devcluster.build import CHECKOUT
from devcluster.images import HOST_IMAGE
from devcluster.kernels import USER, shared_kernels_folder
from devcluster.overlay import host_overlay

CHART = CHECKOUT / "charts" / "moe-operator"
MODEL_MOUNT = "/models/tiny-moe"


def values(checkout: Path = CHECKOUT, kernels_folder: Path | None = None) -> dict[str, Any]:
    """Values for `helm install`, to be written to a file with `write`.

    `kernels_folder` is a folder of USER's where all workers of the machine keep compiled kernels.
    """
    program = checkout / ".venv" / "bin"
    operator = host_overlay("operator", checkout=checkout)["spec"]
    container = operator["containers"][0]
    worker = host_overlay("worker", checkout=checkout, cache_folder=kernels_folder)
    # The real image names its user; the host's image has none.
    worker["spec"]["securityContext"] = {"runAsUser": USER, "runAsGroup": USER}
    worker["spec"]["containers"][0]["command"] = [str(program / "moe-worker")]
    worker["spec"]["containers"][0]["volumeMounts"].append(
        {"name": "model", "mountPath": MODEL_MOUNT, "readOnly": True}
    )
    worker["spec"]["volumes"].append(
        {"name": "model", "hostPath": {"path": str(checkout / "examples/tiny-moe")}}
    )
    repository, _, tag = HOST_IMAGE.rpartition(":")
    image = {"repository": repository, "tag": tag}
    return {
        "image": image,
        "command": [str(program / "moe-operator")],
        "extraEnv": container["env"],
        "extraVolumes": operator["volumes"],
        "extraVolumeMounts": container["volumeMounts"],
        "worker": {"image": image, "podTemplate": worker},
    }


def write(file: Path, checkout: Path = CHECKOUT) -> Path:
    """Write the values where helm can read them (JSON is YAML)."""
    file.write_text(json.dumps(values(checkout, shared_kernels_folder()), indent=1))
    return file
