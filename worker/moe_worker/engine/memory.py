"""How many bytes this process may use, and how many it has used at most."""

from __future__ import annotations

import os
import resource
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


def peak_resident_bytes() -> int:
    """The most memory that this process has had at a time, pages of mapped files included."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
