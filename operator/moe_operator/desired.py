"""Desired: one MoEDeployment as read in this pass: owner, spec to act on, verdict, old status.

Neighbours: `acceptance` judges the manifest; all below `reconcile` take their wishes from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moe_api import names
from moe_api.deployment import MoEDeploymentSpec
from moe_api.honoured import honoured, ignored_fields
from moe_api.status import MoEDeploymentStatus
from moe_operator.acceptance import Acceptance, judge_manifest
from moe_operator.context import Key
from moe_operator.pod_manifest import Owner, template_hash
from moe_operator.settings import WorkerDefaults


@dataclass(frozen=True)
class Desired:
    manifest: Mapping[str, Any]
    owner: Owner
    generation: int
    resource_version: str
    spec: MoEDeploymentSpec
    """What this version acts on: fields it does not honour are at their defaults."""
    ignored: tuple[str, ...]
    """Fields of the written spec that are not honoured."""
    scaling_mode: str
    """`autoscaling.mode` as written."""
    acceptance: Acceptance
    """By the spec alone."""
    previous: MoEDeploymentStatus
    template_hash: str
    """Of pods made from this spec; empty when none can be made."""

    @property
    def key(self) -> Key:
        return Key(self.owner.namespace, self.owner.name)

    def group_name(self, group: int) -> str:
        """Name of the group's ExpertPlacement, and of the group in status."""
        return names.group_name(self.owner.name, group)

    @property
    def token_secret(self) -> tuple[str, str]:
        """Name and key of the Secret with the control token."""
        return token_secret(self.owner, self.spec)


@dataclass(frozen=True)
class Unreadable:
    """A manifest without a usable spec: nothing can be decided, only told."""

    manifest: Mapping[str, Any]
    owner: Owner
    generation: int
    resource_version: str
    acceptance: Acceptance
    previous: MoEDeploymentStatus


def desired(manifest: Mapping[str, Any], defaults: WorkerDefaults) -> Desired | Unreadable:
    metadata = manifest["metadata"]
    owner = Owner(metadata["namespace"], metadata["name"], metadata["uid"])
    generation = int(metadata.get("generation", 0))
    previous = MoEDeploymentStatus.model_validate(manifest.get("status") or {})
    written, acceptance = judge_manifest(manifest, defaults)
    if written is None:
        return Unreadable(
            manifest, owner, generation, metadata["resourceVersion"], acceptance, previous
        )
    spec = honoured(written)
    return Desired(
        manifest=manifest,
        owner=owner,
        generation=generation,
        resource_version=metadata["resourceVersion"],
        spec=spec,
        ignored=tuple(ignored_fields(written)),
        scaling_mode=written.autoscaling.mode,
        acceptance=acceptance,
        previous=previous,
        template_hash=_hash(owner, spec, defaults, acceptance),
    )


def token_secret(owner: Owner, spec: MoEDeploymentSpec) -> tuple[str, str]:
    reference = spec.security.control_token_secret_ref
    if reference is not None:
        return reference.name, reference.key
    return names.control_secret_name(owner.name, owner.uid), names.CONTROL_TOKEN_FILE


def _hash(
    owner: Owner, spec: MoEDeploymentSpec, defaults: WorkerDefaults, acceptance: Acceptance
) -> str:
    if not acceptance.accepted:
        return ""
    return template_hash(owner, spec, defaults, token_secret(owner, spec))
