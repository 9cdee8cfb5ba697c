"""Is the Secret with the keys of the public API there? Pods that mount it do not start before.

Neighbours: `reconcile` asks once in a pass and tells it as a problem; `pod_manifest` mounts it.
"""

from __future__ import annotations

from moe_operator.context import Context
from moe_operator.desired import Desired
from moe_operator.observe import Recent

SECRET_SECONDS = 30.0
"""How old our knowledge of the Secret may be."""


def api_key_problems(ctx: Context, wish: Desired) -> list[str]:
    """What keeps pods from starting, in words; [] when it is there or none is asked for."""
    wanted = wish.spec.api.key_secret_ref
    if wanted is None:
        return []
    recent = ctx.memory.of(wish.key, "api-key", Recent)
    now = ctx.clock.monotonic()
    there = recent.get(now, SECRET_SECONDS, lambda: _is_there(ctx, wish, wanted.name, wanted.key))
    if there:
        return []
    recent.expire()
    return [
        f"spec.api.keySecretRef: secret {wanted.name} has no key {wanted.key}: create it, "
        "or remove the reference"
    ]


def _is_there(ctx: Context, wish: Desired, name: str, key: str) -> bool:
    found = ctx.cluster.get("Secret", wish.owner.namespace, name)
    return bool(((found or {}).get("data") or {}).get(key))
