"""What a worker pod is made of: model, width and pod. A change of it rolls the pods.

Neighbours: `serving` (what the worker does inside its pod, which rolls the pods too), `policy`
(what never touches a running pod); `deployment` joins them. The operator builds pods from these
blocks.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field

from moe_api.block import Block, CelRule, ObjectName, SecretKeyRef, list_map

MAX_RANKS = 1024
RESERVED_ENV_PREFIX = "MOE_"
QUANTITY = (
    r"^(\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))"
    r"(([KMGTPE]i)|[numkMGTPE]|([eE](\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))))?$"
)
MODEL_URI = (
    r"^(file:///.+|pvc://[a-z0-9]([-a-z0-9.]*[a-z0-9])?(/.*)?"
    r"|hf://[A-Za-z0-9._-]+/[A-Za-z0-9._-]+|s3://[a-z0-9.-]+/.+)$"
)

FilePath = Annotated[str, Field(min_length=1, max_length=1024)]
QuantityMap = Annotated[
    dict[str, Annotated[int | str, Field(json_schema_extra={"pattern": QUANTITY})]],
    Field(max_length=32),
]


class Model(Block):
    """Which model to serve and how to load it."""

    RULES = (
        CelRule(
            cel=f"self.uri.matches('{MODEL_URI}')",
            holds=lambda model: _is_model_uri(model.uri),
            message="model.uri is no model source: write file:///path, pvc://claim/path, "
            "hf://org/name or s3://bucket/path",
            explain="model.uri %s is no model source: write file:///path, pvc://claim/path, "
            "hf://org/name or s3://bucket/path",
            values=("uri",),
        ),
        CelRule(
            cel="!self.uri.matches('/[.][.](/|$)')",
            holds=lambda model: not _climbs(model.uri),
            message="model.uri climbs with '..': write the path without it",
            explain="model.uri %s climbs with '..': write the path without it",
            values=("uri",),
        ),
    )

    uri: Annotated[str, Field(min_length=1, max_length=1024)]
    """Where the model is: file:///path in the image or a mount, pvc://claim/path, hf://, s3://."""
    revision: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Branch, tag or commit of a model hub's repository; when absent, its default branch."""
    served_name: Annotated[str, Field(min_length=1, max_length=253)] | None = None
    """Model name in the OpenAI API; when absent, the name of this object."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Type of the weights in memory; auto takes the checkpoint's."""
    max_model_len: Annotated[int, Field(ge=1, le=16_777_216)] | None = None
    """Longest sequence in tokens, prompt and answer; when absent, the model's own limit."""
    token_secret_ref: SecretKeyRef | None = None
    """Token for a model hub that asks for one."""


class Parallelism(Block):
    """How many workers share one copy of the model."""

    expert: Annotated[int, Field(ge=1, le=MAX_RANKS)] = 1
    """Expert-parallel width: the number of workers, called ranks, in a group."""


class Resources(Block):
    """Compute resources of the worker container, as in a pod."""

    limits: QuantityMap | None = None
    """Largest amount of each resource the worker may use."""
    requests: QuantityMap | None = None
    """Amount of each resource kept for the worker; when absent, the limits."""


class Accelerator(Block):
    """The devices of one worker."""

    resource: Annotated[str, Field(min_length=1, max_length=317)] = "nvidia.com/gpu"
    """Extended resource under which nodes offer the device."""
    count: Annotated[int, Field(ge=1, le=16)] = 1
    """Devices for each worker."""


class KeyRef(Block):
    """One key of a Secret or ConfigMap."""

    name: ObjectName
    """Name of the object."""
    key: Annotated[str, Field(min_length=1, max_length=253)]
    """Key in its data."""
    optional: bool = False
    """Start the worker also when the object or the key is missing."""


class EnvSource(Block):
    """Where an environment variable's value comes from."""

    RULES = (
        CelRule(
            cel="has(self.secretKeyRef) != has(self.configMapKeyRef)",
            holds=lambda source: (
                (source.secret_key_ref is None) != (source.config_map_key_ref is None)
            ),
            message="worker.env[].valueFrom needs exactly one of secretKeyRef and configMapKeyRef: "
            "keep one",
        ),
    )

    secret_key_ref: KeyRef | None = None
    """Key of a Secret."""
    config_map_key_ref: KeyRef | None = None
    """Key of a ConfigMap."""


class EnvVar(Block):
    """One environment variable of the worker."""

    RULES = (
        CelRule(
            cel="!(has(self.value) && has(self.valueFrom))",
            holds=lambda env: env.value is None or env.value_from is None,
            message="worker.env has both value and valueFrom: remove one",
            explain="worker.env %s has both value and valueFrom: remove one",
            values=("name",),
        ),
        CelRule(
            cel=f"!self.name.startsWith('{RESERVED_ENV_PREFIX}')",
            holds=lambda env: not env.name.startswith(RESERVED_ENV_PREFIX),
            message="worker.env has a name beginning with MOE_, which is reserved: choose another",
            explain="worker.env %s begins with MOE_, which is reserved: choose another name",
            values=("name",),
        ),
    )

    name: Annotated[
        str, Field(min_length=1, max_length=253, pattern="^[-._a-zA-Z][-._a-zA-Z0-9]*$")
    ]
    """Name of the variable; names beginning with MOE_ are reserved."""
    value: Annotated[str, Field(max_length=32_768)] | None = None
    """Literal value."""
    value_from: EnvSource | None = None
    """Source of the value, instead of a literal one."""


class Worker(Block):
    """The worker pods."""

    batch_invariant: bool = True
    """Answers do not depend on what else runs; false allows faster kernels that may differ."""
    kernels: Literal["auto", "reference"] = "auto"
    """Whose operations compute: the fastest on the device, or plain torch to compare with."""
    image: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """Image of the worker; when absent, the one the operator was installed with."""
    resources: Resources = Resources()
    """Compute resources of each worker."""
    accelerator: Accelerator | None = None
    """Devices of each worker; when absent, workers compute on the CPU."""
    pod_template: Annotated[
        dict[str, Any], Field(json_schema_extra={"x-kubernetes-preserve-unknown-fields": True})
    ] = Field(default_factory=dict)
    """Overlay merged strategically onto each worker pod: metadata labels, annotations, and spec."""
    env: Annotated[list[EnvVar], Field(max_length=64, json_schema_extra=list_map("name"))] = Field(
        default_factory=list
    )
    """Environment variables of the worker."""


def _is_model_uri(uri: str) -> bool:
    return re.match(MODEL_URI, uri) is not None


def _climbs(uri: str) -> bool:
    return ".." in uri.split("/")
