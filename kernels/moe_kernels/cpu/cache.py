"""Where compiled kernels are kept between processes, so that only a first start compiles.

numba follows a change of the file a kernel is in, but not of the files it calls into, so the folder
is named for everything that a kernel is made of: an upgrade begins an empty one and never loads
stale code. Kernels that an image brings (MOE_KERNELS_READY) are put into a new folder before it is
used; they fit the kind of processor they were compiled on, elsewhere they are compiled anew beside
them. A folder that cannot be written is not given up when it holds kernels: they are copied to a
private folder that ends with the process.
Compiled code is executed, so the folder must be as trustworthy as the installation.
Neighbours: `jit` asks for the folder once, at its import.
"""

from __future__ import annotations

import atexit
import logging
import os
import platform
import shutil
import tempfile
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

VARIABLE = "MOE_KERNELS_CACHE"
READY_VARIABLE = "MOE_KERNELS_READY"

log = logging.getLogger(__name__)


def cache_folder(environment: Mapping[str, str], sources: Path, versions: str) -> Path | None:
    """The folder to use now, writable and private where it had to be made; None: there is none."""
    wanted = wanted_folder(environment) / fingerprint(sources, versions)
    ready = environment.get(READY_VARIABLE)
    if _writable(wanted):
        if ready:
            _add(Path(ready) / wanted.name, wanted)
        return wanted
    try:
        private = Path(tempfile.mkdtemp(prefix="moe-kernels-"))
    except OSError as error:
        log.warning("kernels: no cache, %s is read-only and %s", wanted, error)
        return None
    atexit.register(shutil.rmtree, private, ignore_errors=True)
    if wanted.is_dir():
        _add(wanted, private)
        log.info("kernels: cache %s is read-only, used by way of a copy", wanted)
    elif ready and (Path(ready) / wanted.name).is_dir():
        _add(Path(ready) / wanted.name, private)
        log.info("kernels: %s cannot be written, those of %s are used", wanted, ready)
    else:
        log.warning("kernels: %s cannot be written, compiled anew at each start", wanted)
    return private


def wanted_folder(environment: Mapping[str, str]) -> Path:
    """MOE_KERNELS_CACHE, else NUMBA_CACHE_DIR, else a folder of the user's cache."""
    for variable in (VARIABLE, "NUMBA_CACHE_DIR"):
        if environment.get(variable):
            return Path(environment[variable])
    if environment.get("XDG_CACHE_HOME"):
        return Path(environment["XDG_CACHE_HOME"]) / "moe-kernels"
    return Path(environment.get("HOME") or tempfile.gettempdir()) / ".cache" / "moe-kernels"


def fingerprint(sources: Path, versions: str) -> str:
    """Of every source file below `sources` and of `versions`, the names of what compiles them."""
    digest = sha256(f"{versions} python {platform.python_version()}".encode())
    for path in sorted(sources.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"\n{path.relative_to(sources)} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()[:16]


def _add(source: Path, target: Path) -> None:
    """Copy the files that `target` has not; each appears whole, for others may read already."""
    for path in sorted(source.rglob("*")):
        new = target / path.relative_to(source)
        if path.is_dir() or new.exists():
            continue
        new.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=new.parent, delete=False) as file:
            file.write(path.read_bytes())
        os.replace(file.name, new)


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True
