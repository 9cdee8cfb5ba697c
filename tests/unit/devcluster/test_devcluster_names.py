"""Names, addresses and settings of instances: nothing is shared between two of them."""

from __future__ import annotations

from ipaddress import IPv4Network
from pathlib import Path

import pytest

from devcluster.errors import Unsupported
from devcluster.instance import Instance, existing
from devcluster.network import SLICES, Addresses, free_ports, node_commands, pick_slice
from devcluster.spec import RACK, ZONE, ClusterSpec, parse_labels, with_nodes


def test_names_fit_into_a_network_link_and_belong_to_one_instance() -> None:
    longest = Instance("a" * 9, Path("/state"))
    assert len(longest.link(99)) == 15
    short, long = Instance("moe", Path("/state")), Instance("moetest", Path("/state"))
    assert short.owns_link("dc-moe")
    assert short.owns_link(short.link(3))
    assert not short.owns_link(long.link(3))
    assert not short.owns_link(long.bridge)
    assert short.node_cgroup("node1") == "devcluster-moe/node1"


@pytest.mark.parametrize("name", ["", "Moe", "1moe", "a-b", "a" * 10, "../x"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(Unsupported, match="1 to 9"):
        Instance.named(name)


def test_existing_lists_instances_and_nothing_else(tmp_path: Path) -> None:
    for folder in ("moe", "moetest", "moe.failed-logs"):
        (tmp_path / folder).mkdir()
    (tmp_path / "moe.lock").touch()
    assert existing(tmp_path) == ["moe", "moetest"]
    assert existing(tmp_path / "none") == []


def test_slices_do_not_overlap() -> None:
    slices = [Addresses(index) for index in range(SLICES)]
    networks = [network for addresses in slices for network in (addresses.nodes, addresses.pods)]
    services = IPv4Network("10.96.0.0/16")
    for index, network in enumerate(networks):
        assert not any(network.overlaps(other) for other in networks[index + 1 :])
        assert not network.overlaps(services)


def test_addresses_of_a_node() -> None:
    addresses = Addresses(2)
    assert addresses.host == "10.99.2.1"
    assert addresses.node(1) == "10.99.2.2"
    assert addresses.node_pods(1) == "10.162.1.0/24"
    assert IPv4Network(addresses.node_pods(99)).subnet_of(addresses.pods)
    assert addresses.node(99) == "10.99.2.100"


def test_first_slice_without_a_route_is_picked() -> None:
    assert pick_slice([]) == Addresses(0)
    assert pick_slice([IPv4Network("10.99.0.0/24")]) == Addresses(1)
    assert pick_slice([IPv4Network("10.160.7.0/24"), IPv4Network("10.161.0.0/16")]) == Addresses(2)
    with pytest.raises(Unsupported, match="ip route"):
        pick_slice([IPv4Network("10.0.0.0/8")])


def test_a_node_has_routes_to_the_pods_of_the_others_only() -> None:
    commands = node_commands(Addresses(0), 2, 3)
    assert "ip addr add 10.99.0.3/24 dev eth0" in commands
    routes = [command for command in commands if command.startswith("ip route add 10.160")]
    assert routes == [
        "ip route add 10.160.1.0/24 via 10.99.0.2",
        "ip route add 10.160.3.0/24 via 10.99.0.4",
    ]


def test_free_ports_are_different() -> None:
    ports = free_ports(5)
    assert len(set(ports)) == 5


def test_nodes_are_spread_over_racks_and_zones() -> None:
    spec = with_nodes(5, gpus=4, labels={"node2": {RACK: "other", "x": "y"}})
    assert [node.labels[RACK] for node in spec.nodes] == [
        "rack-1", "other", "rack-2", "rack-2", "rack-3",
    ]  # fmt: skip
    assert [node.labels[ZONE] for node in spec.nodes] == ["zone-1"] * 4 + ["zone-2"]
    assert spec.nodes[1].labels["x"] == "y"
    assert ClusterSpec.from_json(spec.to_json()) == spec


def test_impossible_nodes_are_refused() -> None:
    with pytest.raises(Unsupported, match="100 nodes"):
        with_nodes(100)
    with pytest.raises(Unsupported, match="node9"):
        with_nodes(3, labels={"node9": {}})


def test_labels_are_parsed() -> None:
    assert parse_labels(["node1:a/b=c", "node1:d=", "node2:e=f=g"]) == {
        "node1": {"a/b": "c", "d": ""},
        "node2": {"e": "f=g"},
    }
    with pytest.raises(Unsupported, match="node1=a"):
        parse_labels(["node1=a"])
