"""The wires of one instance: a bridge on the host, a cable to each node, and routes to the pods.

Addresses come from a slice of 10.0.0.0/8 that no route of the host uses yet. Nodes reach each
other's pods over the bridge, so the host need not forward anything and its settings stay as they
are. Removing the bridge and the cables removes addresses and routes with them.
"""

from __future__ import annotations

import ipaddress
import json
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from random import SystemRandom

from devcluster.command import run, succeeds
from devcluster.errors import Unsupported
from devcluster.instance import Instance

SLICES = 64
SERVICE_SUBNET = "10.96.0.0/16"
# Below the range that the kernel picks outgoing connections' ports from.
FIRST_PORT, LAST_PORT = 20000, 30000

IPv4Network = ipaddress.IPv4Network


@dataclass(frozen=True)
class Addresses:
    """The addresses of one slice; nodes are numbered from 1."""

    slice_index: int

    @property
    def nodes(self) -> IPv4Network:
        return IPv4Network(f"10.99.{self.slice_index}.0/24")

    @property
    def pods(self) -> IPv4Network:
        """All pods of the cluster."""
        return IPv4Network(f"10.{160 + self.slice_index}.0.0/16")

    @property
    def host(self) -> str:
        """The host's address on the bridge; the API server listens here."""
        return str(self.nodes[1])

    def node(self, number: int) -> str:
        return str(self.nodes[number + 1])

    def node_pods(self, number: int) -> str:
        """The subnet of one node's pods."""
        return f"10.{160 + self.slice_index}.{number}.0/24"


def pick_slice(used: Iterable[IPv4Network]) -> Addresses:
    """Return the first slice that overlaps none of `used`; raises Unsupported when all do."""
    taken = list(used)
    for index in range(SLICES):
        addresses = Addresses(index)
        if not any(
            network.overlaps(addresses.nodes) or network.overlaps(addresses.pods)
            for network in taken
        ):
            return addresses
    raise Unsupported(
        "no free addresses: every 10.99.N.0/24 with 10.(160+N).0.0/16 overlaps a route "
        "of this machine; see `ip route`"
    )


def routed_networks() -> list[IPv4Network]:
    """The networks that this machine has routes to, without the default route."""
    found = []
    for route in json.loads(run("ip", "-json", "-4", "route", "show")):
        if route["dst"] != "default":
            found.append(IPv4Network(route["dst"], strict=False))
    return found


def links() -> list[str]:
    """Names of all network links of the host."""
    return [link["ifname"] for link in json.loads(run("ip", "-json", "link", "show"))]


def create_bridge(instance: Instance, addresses: Addresses) -> None:
    bridge = instance.bridge
    run("ip", "link", "add", bridge, "type", "bridge")
    run("ip", "addr", "add", f"{addresses.host}/{addresses.nodes.prefixlen}", "dev", bridge)
    run("ip", "link", "set", bridge, "up")
    if _drops_forwarded():
        # Docker sets this policy, and br_netfilter applies it to what crosses our bridge.
        run("iptables", "-w", "-I", *_forward_rule(instance))


def connect(instance: Instance, addresses: Addresses, number: int, holder: int) -> None:
    """Lay the cable from the bridge into the network namespace of process `holder`."""
    link = instance.link(number)
    run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", str(holder))
    run("ip", "link", "set", link, "master", instance.bridge, "up")
    # From the host (tests, port-forward) to this node's pods.
    pods, node = addresses.node_pods(number), addresses.node(number)
    run("ip", "route", "replace", pods, "via", node, "dev", instance.bridge)


def node_commands(addresses: Addresses, number: int, num_nodes: int) -> list[str]:
    """Shell commands that set up eth0 inside a node's network namespace."""
    prefix = addresses.nodes.prefixlen
    peers = [peer for peer in range(1, num_nodes + 1) if peer != number]
    return [
        f"ip addr add {addresses.node(number)}/{prefix} dev eth0",
        "ip link set eth0 up",
        # Services' addresses are rewritten after routing: they need a route, any will do.
        f"ip route add default via {addresses.host}",
        *(f"ip route add {addresses.node_pods(peer)} via {addresses.node(peer)}" for peer in peers),
    ]


def remove(instance: Instance) -> None:
    """Remove every link and firewall rule with this instance's name."""
    # Cables first: without its ports the bridge goes quietly.
    for link in sorted(links(), reverse=True):
        if instance.owns_link(link):
            # A cable also goes by itself when its node's namespace ends.
            succeeds("ip", "link", "del", link)
    while succeeds("iptables", "-w", "-D", *_forward_rule(instance)):
        pass


def left_behind(instance: Instance) -> list[str]:
    return [link for link in links() if instance.owns_link(link)]


def free_ports(count: int) -> list[int]:
    """Ports on which nobody listens, different ones for each caller as far as chance allows."""
    ports: list[int] = []
    for port in SystemRandom().sample(range(FIRST_PORT, LAST_PORT), LAST_PORT - FIRST_PORT):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        ports.append(port)
        if len(ports) == count:
            return ports
    raise Unsupported(f"no {count} free ports between {FIRST_PORT} and {LAST_PORT}")


def _drops_forwarded() -> bool:
    return succeeds("iptables", "-w", "-S", "FORWARD") and "-P FORWARD DROP" in run(
        "iptables", "-w", "-S", "FORWARD"
    )


def _forward_rule(instance: Instance) -> list[str]:
    bridge = instance.bridge
    comment = ["-m", "comment", "--comment", instance.rule_comment]
    return ["FORWARD", "-i", bridge, "-o", bridge, *comment, "-j", "ACCEPT"]
