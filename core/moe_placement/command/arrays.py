"""Opening `.npy` and `.npz`: numbers only, never pickled objects, every failure one line.

Neighbours: `load_files`, `trace_files`, `plan_files` say what the arrays mean.
"""

from __future__ import annotations

import struct
import tokenize
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from moe_placement.command.usage import UsageError

Array = npt.NDArray[np.generic]

BROKEN = (
    OSError, EOFError, ValueError, KeyError, TypeError, SyntaxError, RuntimeError, MemoryError,
    struct.error, tokenize.TokenError, zipfile.BadZipFile, zlib.error,
)  # fmt: skip
"""What numpy and zipfile raise for damaged files, wherever the damage is."""
MAX_BYTES = 4 << 30
"""Largest file that is read; a trace of a day is far below it."""


def check_file(flag: str, path: Path) -> None:
    """Raise UsageError unless `path` is a file of a size that can be read."""
    try:
        size = path.stat().st_size
    except OSError as error:
        raise UsageError(f"{flag}: can not read {path}: {error.strerror}") from error
    if path.is_dir():
        raise UsageError(f"{flag}: {path} is a folder, give a file in it")
    if size > MAX_BYTES:
        raise UsageError(f"{flag}: {path} has {size} bytes, more than {MAX_BYTES}: cut it up")


def read_npy(flag: str, path: Path) -> Array:
    """The array in a .npy file."""
    check_file(flag, path)
    try:
        found = np.load(path, allow_pickle=False)
    except BROKEN as error:
        raise UsageError(f"{flag}: {path} is no whole .npy file of numbers: {error}") from error
    if not isinstance(found, np.ndarray):
        raise UsageError(f"{flag}: {path} is an .npz archive under a .npy name: rename it")
    return _numbers(flag, f"{path}", found)


def read_npz(flag: str, path: Path) -> dict[str, Array]:
    """All arrays in an .npz file, by name."""
    check_file(flag, path)
    if not zipfile.is_zipfile(path):
        raise UsageError(f"{flag}: {path} is no whole .npz file: write it again with numpy.savez")
    try:
        with np.load(path, allow_pickle=False) as archive:
            found = {name: np.asarray(archive[name]) for name in archive.files}
    except BROKEN as error:
        raise UsageError(f"{flag}: {path} is no whole .npz file of numbers: {error}") from error
    if not found:
        raise UsageError(f"{flag}: {path} has no arrays")
    return {name: _numbers(flag, f"{path}: {name}", array) for name, array in found.items()}


def pick(flag: str, path: Path, arrays: Mapping[str, Array], *names: str) -> Array:
    """The array with the first of `names` that is there, or the only array."""
    for name in names:
        if name in arrays:
            return arrays[name]
    if len(arrays) == 1:
        return next(iter(arrays.values()))
    raise UsageError(
        f"{flag}: {path} has arrays {', '.join(sorted(arrays)[:8])}: "
        f"name the one meant {names[0]!r}"
    )


def whole_numbers(flag: str, what: str, array: Array) -> npt.NDArray[np.int64]:
    """`array` as int64, where all its values are whole."""
    values = np.asarray(array, dtype=np.float64)
    wrong = ~np.isfinite(values) | (values != np.floor(values)) | (np.abs(values) > 2**53)
    if wrong.any():
        where = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise UsageError(f"{flag}: {what}{list(where)} is {values[where]:g}: must be whole numbers")
    return values.astype(np.int64)


def _numbers(flag: str, what: str, array: Array) -> Array:
    if array.dtype.kind not in "iufb":
        raise UsageError(f"{flag}: {what} has dtype {array.dtype}: must be integers or floats")
    return array
