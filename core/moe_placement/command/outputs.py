"""Writing result files: checked before the work begins, whole or not at all.

Neighbours: `plan_formats` (what is in them), `plot` (pictures).
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable
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
    if path.is_dir():
        raise UsageError(f"{flag}: {path} is a folder")
    folder = path.parent
    if not folder.is_dir():
        raise UsageError(f"{flag}: folder {folder} does not exist: make it first")
    if not os.access(folder, os.W_OK):
        raise UsageError(f"{flag}: folder {folder} can not be written to")


def write(flag: str, path: Path, content: bytes) -> None:
    """Replace `path` by a file of this content.

    Raises:
        UsageError: the disk is full, or the folder is gone.
    """
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
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
