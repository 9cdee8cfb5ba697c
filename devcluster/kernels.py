"""Compiles the kernels of the test model before pods need them, in a folder that all pods share.

A first start compiles for a minute and more; for much longer when several pods do it on a small
machine while the cluster starts. So the demo and the tests do it first, alone, with progress.
Neighbours: `chart` mounts the folder into the workers; `moe-worker warm-up` is what compiles.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from devcluster.build import CHECKOUT, cache_folder

USER = 65532
"""The user whom the chart's workers run as."""
MODEL = CHECKOUT / "examples" / "tiny-moe"
KEPT = 4
"""Folders of former sources that stay; each is named for what it was compiled from."""


def shared_kernels_folder() -> Path:
    """In the user's cache, made for USER: a kernel is then compiled once on this machine."""
    folder = cache_folder() / "kernels"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _give_away(folder)
    return folder


def main() -> int:
    if os.geteuid() != 0:
        return 0  # without root there are no pods
    from moe_kernels.cpu.cache import wanted_folder

    folder = shared_kernels_folder()
    former = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime)
    for path in former[:-KEPT]:
        shutil.rmtree(path, ignore_errors=True)
    warm_up = [sys.executable, "-m", "moe_worker.main", "warm-up", "--model", str(MODEL)]
    # What this user has compiled already is copied and not compiled again.
    environment = {
        **os.environ,
        "MOE_KERNELS_CACHE": str(folder),
        "MOE_KERNELS_READY": str(wanted_folder(os.environ)),
    }
    done = subprocess.run(warm_up, env=environment, check=False)
    for path in folder.rglob("*"):
        _give_away(path)
    return done.returncode


def _give_away(path: Path) -> None:
    if os.geteuid() == 0:
        os.chown(path, USER, USER)


if __name__ == "__main__":
    sys.exit(main())
