"""Topology measured: traffic between nodes, and nodes that a token's experts are on.

Shapes: L layers, E logical experts, R ranks, S slots a rank, D domains (nodes).
"""

from __future__ import annotations

from collections.abc import Iterator

from bench.figure import Choice, Tally


def crossing(choice: Choice) -> Iterator[Tally]:
    yield from ()


def nodes_per_token(choice: Choice) -> Iterator[Tally]:
    yield from ()
