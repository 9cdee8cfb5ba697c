"""Can this spec be served at all? By the spec alone first, then by what workers read of the model.

Pure; the outcome is the condition `Accepted`. A verdict about the model is remembered in that
condition until the spec changes, since its witnesses (the pods) are removed.
Neighbours: `reconcile` asks; `rollout` turns a refusal into what becomes of the groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe_api.conditions import Condition, ConditionType, Reason, find
from moe_api.deployment import InvalidSpec, MoEDeploymentSpec, parse, slots_per_rank
from moe_api.worker import ModelShape
from moe_operator.pod_manifest import NoImage, check_image
from moe_operator.pods import PodView
from moe_operator.settings import WorkerDefaults
from moe_operator.worker_config import ModelSourceUnsupported, model_source

MODEL_REASONS = (
    Reason.MODEL_HAS_NO_EXPERTS,
    Reason.MODEL_UNREADABLE,
    Reason.INSUFFICIENT_SLOTS,
)


@dataclass(frozen=True)
class Acceptance:
    reason: Reason
    message: str

    @property
    def accepted(self) -> bool:
        return self.reason is Reason.VALID

    @property
    def blames_model(self) -> bool:
        """Workers had to run to find out; they are of no use now."""
        return self.reason in MODEL_REASONS


VALID = Acceptance(Reason.VALID, "the spec can be served")


def judge_manifest(
    manifest: Mapping[str, Any], defaults: WorkerDefaults
) -> tuple[MoEDeploymentSpec | None, Acceptance]:
    """The spec as written (None when it cannot even be read), and whether it can be served.

    Overlays are the part that no schema checks at the door. With a refused one the rest of the spec
    still says how to keep alive what serves; no pod is made of it.
    """
    try:
        spec = parse(manifest)
    except InvalidSpec as error:
        return _without_overlay(manifest), Acceptance(Reason.INVALID_SPEC, str(error))
    return spec, _judge_spec(spec, defaults)


def _without_overlay(manifest: Mapping[str, Any]) -> MoEDeploymentSpec | None:
    spec = dict(manifest.get("spec") or {})
    spec["worker"] = {k: v for k, v in (spec.get("worker") or {}).items() if k != "podTemplate"}
    try:
        return parse({**manifest, "spec": spec})
    except InvalidSpec:
        return None  # the fault lies elsewhere, and is told already


def judge_model(
    spec: MoEDeploymentSpec,
    pods: Sequence[PodView],
    model: ModelShape | None,
    generation: int,
    previous: Iterable[Condition],
) -> Acceptance:
    """Whether the model that workers of the present template (`pods`) read fits the spec."""
    for pod in pods:
        state = pod.state
        if pod.worker_failed and state is not None:
            for reason in (Reason.MODEL_HAS_NO_EXPERTS, Reason.MODEL_UNREADABLE):
                if state.error_reason == reason.value:
                    message = f"spec.model.uri {spec.model.uri}: {state.last_error or reason.value}"
                    return Acceptance(reason, message)
            if state.error_reason == Reason.KV_CACHE_UNUSABLE.value:
                message = f"spec.kvCache does not fit the model: {state.last_error or 'no message'}"
                return Acceptance(Reason.KV_CACHE_UNUSABLE, message)
    if model is not None:
        return _judge_shape(spec, model)
    return _remembered(generation, previous)


def _judge_spec(spec: MoEDeploymentSpec, defaults: WorkerDefaults) -> Acceptance:
    try:
        model_source(spec.model.uri)
    except ModelSourceUnsupported as error:
        return Acceptance(Reason.MODEL_SOURCE_UNSUPPORTED, str(error))
    if spec.failure_policy.mode != "Elastic":
        return Acceptance(
            Reason.FAILURE_MODE_UNSUPPORTED,
            f"spec.failurePolicy.mode {spec.failure_policy.mode} is not supported by this version: "
            "use Elastic",
        )
    try:
        check_image(spec, defaults)
    except NoImage as error:
        return Acceptance(Reason.INVALID_SPEC, str(error))
    return VALID


def _judge_shape(spec: MoEDeploymentSpec, model: ModelShape) -> Acceptance:
    width = spec.parallelism.expert
    if model.experts < 2 or model.layers < 1:
        return Acceptance(
            Reason.MODEL_HAS_NO_EXPERTS,
            f"spec.model.uri {spec.model.uri}: the model has no layer with experts",
        )
    slots = slots_per_rank(spec.experts, model.experts, width)
    if slots * width < model.experts:
        needed = -(-model.experts // width)
        return Acceptance(
            Reason.INSUFFICIENT_SLOTS,
            f"spec.experts.slotsPerRank {slots} on {width} ranks gives {slots * width} slots for "
            f"{model.experts} experts: set it to {needed} or more, or raise parallelism.expert",
        )
    room, wanted = width * min(slots, model.experts), spec.experts.min_replicas * model.experts
    if room < wanted:
        return Acceptance(
            Reason.INSUFFICIENT_SLOTS,
            f"spec.experts.minReplicas {spec.experts.min_replicas} needs {wanted} slots for "
            f"{model.experts} experts, {slots} on each of {width} ranks give {room}: lower it to "
            f"{room // model.experts}, or set experts.slotsPerRank to {-(-wanted // width)}",
        )
    return Acceptance(
        Reason.VALID,
        f"the spec can be served: {slots} slots on each of {width} ranks, {model.experts} for one "
        f"copy of each expert and {slots * width - model.experts} for more copies",
    )


def _remembered(generation: int, previous: Iterable[Condition]) -> Acceptance:
    """What was told of the model while its witnesses were there; a good verdict may be told anew at
    any time, so of it only the message stays."""
    condition = find(previous, ConditionType.ACCEPTED)
    kept = {Reason.VALID.value, *(reason.value for reason in MODEL_REASONS)}
    if (
        condition is not None
        and condition.observed_generation == generation
        and condition.reason in kept
    ):
        return Acceptance(Reason(condition.reason), condition.message)
    return VALID
