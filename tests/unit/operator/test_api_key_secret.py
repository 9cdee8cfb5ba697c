"""A Secret of API keys that is missing is told, with the way out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from moe_api.deployment import MoEDeploymentSpec
from moe_operator.api_key_secret import SECRET_SECONDS, api_key_problems
from moe_operator.context import Key
from moe_operator.pod_manifest import Owner


class World:
    """What the function asks of a Context."""

    def __init__(self, data: dict[str, str] | None) -> None:
        self.data = data
        self.now = 0.0
        self.num_reads = 0
        self._memory: dict[str, Any] = {}
        self.cluster = SimpleNamespace(get=self._get)
        self.clock = SimpleNamespace(monotonic=lambda: self.now)
        self.memory = SimpleNamespace(of=self._of)

    def _get(self, kind: str, namespace: str, name: str) -> dict[str, Any] | None:
        assert (kind, namespace, name) == ("Secret", "ns", "keys")
        self.num_reads += 1
        return None if self.data is None else {"data": self.data}

    def _of(self, key: Key, name: str, make: Any) -> Any:
        return self._memory.setdefault(name, make())


def problems(world: World, **api: Any) -> list[str]:
    spec = MoEDeploymentSpec.model_validate({"model": {"uri": "file:///m"}, "api": api})
    wish = SimpleNamespace(spec=spec, key=Key("ns", "d"), owner=Owner("ns", "d", "uid"))
    found: list[str] = api_key_problems(world, wish)  # type: ignore[arg-type]
    return found


REFERENCE = {"name": "keys", "key": "current"}


@pytest.mark.parametrize("data", [None, {}, {"other": "eA=="}, {"current": ""}])
def test_a_missing_key_is_told(data: dict[str, str] | None) -> None:
    [problem] = problems(World(data), keySecretRef=REFERENCE)
    assert "spec.api.keySecretRef: secret keys has no key current" in problem
    assert "create it, or remove" in problem


def test_what_is_there_is_not_read_at_every_pass() -> None:
    world = World({"current": "eA=="})
    for _ in range(3):
        assert problems(world, keySecretRef=REFERENCE) == []
    assert world.num_reads == 1
    world.now += SECRET_SECONDS
    world.data = None
    assert problems(world, keySecretRef=REFERENCE)
    world.data = {"current": "eA=="}
    assert problems(world, keySecretRef=REFERENCE) == [], "what was missing is looked for at once"


def test_without_a_reference_nothing_is_read() -> None:
    world = World(None)
    assert problems(world) == []
    assert world.num_reads == 0
