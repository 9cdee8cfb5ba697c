"""Ages: for how long each fact has been seen without a break; pauses and deadlines go by them.

Facts are seen, not dated: clocks of nodes and API server need not agree with ours. Losing the
memory (a restart) starts the ages anew, which makes a pause longer, never shorter.
Neighbours: `reconcile` keeps one per MoEDeployment; `groups` reads the ages.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping


class Ages:
    """Bounded by what is seen: a fact that is not seen any more is forgotten."""

    def __init__(self) -> None:
        self._since: dict[Hashable, float] = {}

    def see(self, facts: Iterable[Hashable], now_seconds: float) -> Mapping[Hashable, float]:
        """Ages in seconds of all facts that hold now; `now_seconds` is monotonic."""
        self._since = {fact: self._since.get(fact, now_seconds) for fact in facts}
        return {fact: now_seconds - since for fact, since in self._since.items()}
