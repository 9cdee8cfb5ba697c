"""What is made of a frozen object once and then shared, kept beside it.

Neighbours: `attention_plan` and `kv_pages` carry one each; implementations keep there what they cut
or view in their own way, so that the contract's objects need not know of it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")


class Derived:
    """Not for several threads at once: two may make the same thing, and the later one stays."""

    def __init__(self) -> None:
        self._made: dict[Hashable, Any] = {}

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` gave when `key` was first asked for."""
        if key not in self._made:
            self._made[key] = make()
        made: T = self._made[key]
        return made
