"""Topology: which node labels say how near two workers are.

Labels are data, since clusters name racks and NVLink domains in many ways. The operator reads
nodes' labels and writes each member's domains into the plan (`plan.Member.domains`);
`moe_placement` reads them there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from moe_api.block import Block, CelRule, list_map

MAX_LEVELS = 8
LevelName = Annotated[
    str, Field(min_length=1, max_length=63, pattern="^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")
]


class TopologyLevel(Block):
    """A way to divide the nodes by one label."""

    name: LevelName
    """Name by which pack and replicaSpread refer to the level."""
    node_label: Annotated[
        str,
        Field(
            min_length=1,
            max_length=317,
            pattern=r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$",
        ),
    ]
    """Node label whose values are the domains of this level, e.g. nvidia.com/gpu.clique."""


DEFAULT_LEVELS = (
    TopologyLevel(name="zone", node_label="topology.kubernetes.io/zone"),
    TopologyLevel(name="hostname", node_label="kubernetes.io/hostname"),
)


class Pack(Block):
    """Keep the workers of a group in one domain."""

    level: LevelName
    """Level in whose domain all workers of a group are wanted; one of levels."""
    mode: Literal["Required", "Preferred"] = "Preferred"
    """Required leaves pods pending rather than split the group, Preferred splits it if it must."""


class ReplicaSpread(Block):
    """Keep copies of an expert apart."""

    level: LevelName
    """Level over whose domains the copies of an expert are spread; one of levels."""
    min_domains: Annotated[int, Field(ge=1, le=64)] = 2
    """Number of domains wanted for the copies of an expert that has as many copies."""


def _level_rule(block: str) -> CelRule:
    default = ", ".join(f"'{level.name}'" for level in DEFAULT_LEVELS)
    return CelRule(
        cel=(
            f"!has(self.{block}) || (has(self.levels) "
            f"? self.levels.exists(l, l.name == self.{block}.level) "
            f": self.{block}.level in [{default}])"
        ),
        holds=lambda topology: (
            topology.at(block) is None
            or topology.at(block).level in {level.name for level in topology.wanted_levels()}
        ),
        message=f"topology.{block}.level is not one of topology.levels: "
        "use the name of a level, or add it to topology.levels",
        explain=f"topology.{block}.level %s is not one of topology.levels: "
        "use the name of a level, or add it to topology.levels",
        values=(f"{block}.level",),
    )


class Topology(Block):
    """What counts as near, broad to narrow, and what is wanted of it."""

    RULES = (_level_rule("pack"), _level_rule("replicaSpread"))

    levels: Annotated[
        list[TopologyLevel] | None,
        Field(min_length=1, max_length=MAX_LEVELS, json_schema_extra=list_map("name")),
    ] = None
    """Levels from broad to narrow; when absent, zone and hostname, as far as nodes carry them."""
    pack: Pack | None = None
    """Wish to keep each group's workers in one domain of a level."""
    replica_spread: ReplicaSpread | None = None
    """Wish to spread the copies of an expert over the domains of a level."""

    def wanted_levels(self) -> tuple[TopologyLevel, ...]:
        """The levels the user wrote, or else the default ones."""
        return DEFAULT_LEVELS if self.levels is None else tuple(self.levels)


class LevelsFound(NamedTuple):
    in_use: tuple[TopologyLevel, ...]
    """Levels that at least one node carries, broad to narrow."""
    missing: tuple[TopologyLevel, ...]
    """Levels the user wrote and no node carries; a default level is never missing."""


def find_levels(topology: Topology, nodes_labels: Iterable[Mapping[str, str]]) -> LevelsFound:
    """Sort the wanted levels by whether any node carries their label."""
    carried = {key for labels in nodes_labels for key in labels}
    wanted = topology.wanted_levels()
    absent = tuple(level for level in wanted if level.node_label not in carried)
    return LevelsFound(
        in_use=tuple(level for level in wanted if level.node_label in carried),
        missing=() if topology.levels is None else absent,
    )


def domains_of(levels: Sequence[TopologyLevel], labels: Mapping[str, str]) -> list[str]:
    """One domain a level for a node with these labels, '' where the node lacks the label."""
    return [labels.get(level.node_label, "") for level in levels]
