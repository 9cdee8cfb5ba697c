"""How many bytes this process may use: the container's limit, else the machine's memory."""

from __future__ import annotations

import os
from pathlib import Path

CGROUP_FILES = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def memory_limit_bytes(files: tuple[Path, ...] = CGROUP_FILES) -> int:
    """The smallest of physical memory and the control groups' limits (version 2, then 1)."""
    limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for file in files:
        try:
            text = file.read_text().strip()
        except OSError:
            continue  # this machine has the other version, or none
        if text.isdecimal():
            limit = min(limit, int(text))
    return limit
