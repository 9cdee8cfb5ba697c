"""Levels of topology: which are in use, which are missing, and a node's domains."""

from __future__ import annotations

from moe_api.topology import DEFAULT_LEVELS, Topology, TopologyLevel, domains_of, find_levels

HOST = {"kubernetes.io/hostname": "node-1"}
RACK = TopologyLevel(name="rack", node_label="example.org/rack")


def test_default_level_that_no_node_carries_is_left_out_and_not_missing() -> None:
    found = find_levels(Topology(), [HOST, {}])
    assert [level.name for level in found.in_use] == ["hostname"]
    assert found.missing == ()


def test_written_level_that_no_node_carries_is_missing() -> None:
    topology = Topology(levels=[RACK, DEFAULT_LEVELS[1]])
    found = find_levels(topology, [HOST])
    assert [level.name for level in found.in_use] == ["hostname"]
    assert found.missing == (RACK,)


def test_domains_follow_the_levels_broad_to_narrow() -> None:
    levels = [RACK, DEFAULT_LEVELS[1]]
    assert domains_of(levels, HOST | {"example.org/rack": "r7"}) == ["r7", "node-1"]
    assert domains_of(levels, HOST) == ["", "node-1"]
