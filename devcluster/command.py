"""Running a program for its effect: quietly when it works, with its own words when it does not."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from devcluster.errors import CommandFailed

# Root's PATH is often without the sbin folders, where ip, iptables and nsenter may live.
SEARCH_PATH = os.pathsep.join(
    [
        os.environ.get("PATH", os.defpath),
        "/usr/local/sbin",
        "/usr/sbin",
        "/sbin",
        "/usr/bin",
        "/bin",
    ]
)


def run(*argv: str | Path, timeout_seconds: float = 60) -> str:
    """Run a program and return its standard output; raises CommandFailed with its errors."""
    words = [str(word) for word in argv]
    try:
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            env={**os.environ, "PATH": SEARCH_PATH},
            timeout=timeout_seconds,
        )
    except FileNotFoundError as error:
        raise CommandFailed(f"{words[0]} is not installed") from error
    except subprocess.TimeoutExpired as error:
        raise CommandFailed(f"`{' '.join(words)}` ran past {timeout_seconds:g} s") from error
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip()
        raise CommandFailed(f"`{' '.join(words)}` returned {done.returncode}: {said}")
    return done.stdout


def succeeds(*argv: str | Path) -> bool:
    """Whether a program returns 0; for questions and for removing what may not be there."""
    try:
        run(*argv)
    except CommandFailed:
        return False
    return True
