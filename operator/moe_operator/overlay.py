"""Strategic merge of a pod overlay, the way `kubectl patch` does it, for the lists a pod has.

Pure: plain dicts in, a new dict out. Maps merge key by key, lists with a merge key item by item,
every other list is replaced, and null removes. Neighbour: `pod_manifest` merges the user's
`worker.podTemplate` (whose reserved keys `moe_api.pod_template` has refused).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "imagePullSecrets": "name",
    "resourceClaims": "name",
    "env": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
}


def merge(base: Mapping[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `overlay` put over it; neither is changed."""
    out = dict(base)
    for key, value in overlay.items():
        if value is None:
            out.pop(key, None)
        else:
            out[key] = _merge_value(key, out.get(key), value)
    return out


def _merge_value(key: str, base: Any, overlay: Any) -> Any:
    if isinstance(overlay, Mapping):
        return merge(base if isinstance(base, Mapping) else {}, overlay)
    if key in MERGE_KEYS and isinstance(base, list) and isinstance(overlay, list):
        return _merge_list(MERGE_KEYS[key], base, overlay)
    return overlay


def _merge_list(
    merge_key: str, base: Sequence[Mapping[str, Any]], overlay: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Items of the base in their order, changed where the overlay names them; new ones behind."""
    changes = {item[merge_key]: item for item in overlay}
    known = {item[merge_key] for item in base}
    kept = [merge(item, changes.get(item[merge_key], {})) for item in base]
    return kept + [merge({}, item) for item in overlay if item[merge_key] not in known]
