"""What a pod needs to run this checkout's programs: the host's files, mounted read-only.

There is no registry, so the image holds empty folders only (`devcluster.images`), and the pod sees
the host's /usr, the Python behind the virtual environment, the environment and the checkout at
their own paths. The result is an overlay for a pod template, merged as Kubernetes merges lists of
containers, volumes and environment variables: by their names.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from devcluster.build import CHECKOUT
from devcluster.errors import Unsupported
from devcluster.images import HOST_IMAGE

SOURCE_ROOTS = ("core", "operator", "worker", "kernels")
KERNELS_DIR = "/var/cache/moe-kernels"
"""Where the operator's pods look for compiled kernels (`moe_api.names`)."""
# The linker's index of libraries outside of its built-in folders, and Debian's choices.
SYSTEM_FILES = (Path("/etc/ld.so.cache"), Path("/etc/alternatives"))


def host_overlay(
    container: str = "worker",
    *,
    checkout: Path = CHECKOUT,
    environment: Path | None = None,
    cache_folder: Path | None = None,
) -> dict[str, Any]:
    """Return a pod template overlay for the container of that name.

    `environment` is the virtual environment, by default `.venv` in the checkout: the container can
    run its `python`, which is first on PATH, with the project importable. Nothing but /tmp (which
    the pod must bring: an emptyDir) has to be writable, and any user id will do. `cache_folder` is
    a host folder where pods may keep compiled kernels for each other; it must be writable for the
    pod's user. Raises Unsupported when a folder is missing or closed to other users.
    """
    environment = environment or checkout / ".venv"
    folders = covering([Path("/usr"), checkout, environment, *python_prefixes(environment)])
    for folder in folders:
        _require_open(folder)
    files = [file for file in SYSTEM_FILES if file.exists()]
    volumes = [_volume(f"host-{index}", path) for index, path in enumerate([*folders, *files])]
    mounts = [
        {"name": f"host-{index}", "mountPath": str(path), "readOnly": True}
        for index, path in enumerate([*folders, *files])
    ]
    variables = {
        "HOME": "/tmp",
        "PATH": f"{environment}/bin:/usr/local/bin:/usr/bin:/bin",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": ":".join(str(checkout / root) for root in SOURCE_ROOTS),
        "PYTHONUNBUFFERED": "1",
        "USER": "moe",
    }
    if cache_folder is not None:
        volumes.append(_volume("compiled", cache_folder))
        mounts.append({"name": "compiled", "mountPath": KERNELS_DIR})
    overlaid = {
        "name": container,
        "image": HOST_IMAGE,
        "imagePullPolicy": "IfNotPresent",
        "env": [{"name": name, "value": value} for name, value in variables.items()],
        "volumeMounts": mounts,
    }
    return {"spec": {"containers": [overlaid], "volumes": volumes}}


def python_prefixes(environment: Path) -> list[Path]:
    """The installation that a virtual environment was made from, as written and as resolved."""
    settings = environment / "pyvenv.cfg"
    if not settings.is_file():
        raise Unsupported(f"{environment} is no virtual environment: it has no pyvenv.cfg")
    for line in settings.read_text().splitlines():
        key, _, value = line.partition("=")
        if key.strip() == "home":
            home = Path(value.strip())
            return [
                prefix for prefix in (home.parent, home.resolve().parent) if prefix != Path("/")
            ]
    raise Unsupported(f"{settings} does not name the Python it was made from (home = …)")


def covering(paths: Iterable[Path]) -> list[Path]:
    """The fewest of these folders that contain all of them, sorted."""
    chosen: list[Path] = []
    for path in sorted(set(paths)):  # a folder sorts before what is in it
        if not any(path.is_relative_to(above) for above in chosen):
            chosen.append(path)
    return chosen


def _volume(name: str, path: Path) -> dict[str, Any]:
    kind = "Directory" if path.is_dir() else "File"
    return {"name": name, "hostPath": {"path": str(path), "type": kind}}


def _require_open(folder: Path) -> None:
    """Folders above it do not count: a mount opens a way of its own."""
    if not folder.is_dir():
        raise Unsupported(f"{folder} is not there, and the pods need it")
    if folder.stat().st_mode & 0o005 != 0o005:
        raise Unsupported(
            f"{folder} is closed to other users, and pods do not run as root: "
            f"`chmod -R o+rX {folder}`"
        )
