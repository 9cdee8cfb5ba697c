"""Writing result files: checked before the work begins, whole or not at all.

Neighbours: `plan_formats` (what is in them), `plot` (pictures).
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from moe_placement.command.usage import UsageError

STATS_SUFFIXES = (".json",)


def check(flag: str, path: Path | None, suffixes: Iterable[str]) -> None:
    """Raise UsageError when `path` can not become a file of one of `suffixes`."""
    if path is None:
        return
    known = tuple(suffixes)
    if path.suffix not in known:
        raise UsageError(f"{flag}: {path} must end in {' or '.join(known)}")
    folder = Path(os.path.realpath(path)).parent
    try:
        if path.is_dir():
            raise UsageError(f"{flag}: {path} is a folder")
        if path.exists() and not path.is_file():
            raise UsageError(f"{flag}: {path} is a pipe or device: give a file")
        if not folder.is_dir():
            raise UsageError(f"{flag}: folder {folder} does not exist: make it first")
    except OSError as error:  # a name that is too long, a loop of links
        raise UsageError(f"{flag}: can not write {path}: {error.strerror}") from error
    if not os.access(folder, os.W_OK):
        raise UsageError(f"{flag}: folder {folder} can not be written to")


def check_apart(written: Mapping[str, Path | None], read: Mapping[str, Path | None]) -> None:
    """Raise UsageError when two flags name one file, of which one would destroy the other's.

    Args:
        written: files by flag, which are written after each other.
        read: files by flag that must stay.
    """
    seen = {os.path.realpath(path): flag for flag, path in read.items() if path is not None}
    for flag, path in written.items():
        if path is None:
            continue
        other = seen.setdefault(os.path.realpath(path), flag)
        if other != flag:
            raise UsageError(f"{flag}: {path} is the file of {other} as well: give another name")


def write(flag: str, path: Path, content: bytes) -> None:
    """Replace `path` by a file of this content.

    Raises:
        UsageError: the disk is full, or the folder is gone.
    """
    try:
        path = Path(os.path.realpath(path))  # a link stays one, its file is replaced
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".moe-plan-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            os.chmod(name, 0o666 & ~_umask())
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise UsageError(f"{flag}: can not write {path}: {error.strerror}") from error


def write_json(flag: str, path: Path, document: dict[str, Any]) -> None:
    write(flag, path, f"{json.dumps(document, indent=2, allow_nan=False)}\n".encode())


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
