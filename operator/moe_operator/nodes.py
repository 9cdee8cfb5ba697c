"""The projection of a Node: what topology and drains depend on, and nothing else.

A Node's status changes every few minutes; `main` asks for passes only when its projection changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def project(node: Mapping[str, Any]) -> dict[str, Any]:
    """`{name, labels, ready, unschedulable}` of a Node in wire form."""
    conditions = node.get("status", {}).get("conditions") or []
    return {
        "name": node["metadata"]["name"],
        "labels": dict(node["metadata"].get("labels") or {}),
        "ready": any(c["type"] == "Ready" and c["status"] == "True" for c in conditions),
        "unschedulable": bool(node.get("spec", {}).get("unschedulable", False)),
    }
