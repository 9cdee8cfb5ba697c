"""The names of one instance: all that it makes on the machine is called after it.

So `down` finds what is to be removed without any record, also after the recording process was
killed, and two instances never touch each other's things.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from devcluster.errors import Unsupported

DEFAULT_NAME = "demo"
# A network link's name holds 15 characters: "dc-", the instance, "-" and two digits of a node.
NAME = re.compile(r"[a-z][a-z0-9]{0,8}")
MAX_NODES = 99


def state_root() -> Path:
    """Where all instances of this user keep their state."""
    if os.geteuid() == 0:
        return Path("/var/lib/moe-devcluster")
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "moe-devcluster"


@dataclass(frozen=True)
class Instance:
    """A name and the folder of all instances; the rest follows."""

    name: str
    root: Path

    @classmethod
    def named(cls, name: str) -> Instance:
        """Raises Unsupported for a name that does not fit into a network link's name."""
        if not NAME.fullmatch(name):
            raise Unsupported(
                f"instance name {name!r}: use 1 to 9 lower-case letters and digits, a letter first"
            )
        return cls(name, state_root())

    @property
    def state(self) -> Path:
        """The folder with everything that this instance writes."""
        return self.root / self.name

    @property
    def lock(self) -> Path:
        """Held while the instance is changed; outlives its state."""
        return self.root / f"{self.name}.lock"

    @property
    def failed_logs(self) -> Path:
        """Where the logs of a failed start are kept."""
        return self.root / f"{self.name}.failed-logs"

    @property
    def record(self) -> Path:
        """What `up` wrote when all was ready; absent as long as it is not."""
        return self.state / "cluster.json"

    @property
    def bridge(self) -> str:
        """The host's network bridge that joins the nodes."""
        return f"dc-{self.name}"

    def link(self, node_number: int) -> str:
        """The host's end of a node's network cable."""
        return f"{self.bridge}-{node_number}"

    def owns_link(self, link: str) -> bool:
        return link == self.bridge or link.startswith(f"{self.bridge}-")

    @property
    def cgroup(self) -> str:
        return f"devcluster-{self.name}"

    def node_cgroup(self, node: str) -> str:
        return f"{self.cgroup}/{node}"

    @property
    def rule_comment(self) -> str:
        """Marks this instance's firewall rules."""
        return f"devcluster-{self.name}"


def existing(root: Path) -> list[str]:
    """Names of the instances that have a state folder, sorted."""
    if not root.is_dir():
        return []
    return sorted(
        entry.name for entry in root.iterdir() if entry.is_dir() and NAME.fullmatch(entry.name)
    )
