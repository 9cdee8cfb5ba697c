"""Opening `.npy` and `.npz`: numbers only, never pickled objects, every failure one line.

Neighbours: `load_files`, `trace_files`, `plan_files` say what the arrays mean.
"""

from __future__ import annotations

import os
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
    OverflowError, struct.error, tokenize.TokenError, zipfile.BadZipFile, zlib.error,
)  # fmt: skip
"""What numpy and zipfile raise for damaged files, wherever the damage is."""
MAX_BYTES = 4 << 30
"""Largest file that is read, unpacked; a trace of a day is far below it."""


def check_file(flag: str, path: Path) -> None:
    """Raise UsageError unless `path` is a file of a size that can be read."""
    try:
        size = path.stat().st_size
    except OSError as error:
        raise UsageError(f"{flag}: can not read {path}: {error.strerror}") from error
    if path.is_dir():
        raise UsageError(f"{flag}: {path} is a folder, give a file in it")
    if not path.is_file():
        raise UsageError(f"{flag}: {path} is a pipe or device: save what it brings as a file")
    if not os.access(path, os.R_OK):
        raise UsageError(f"{flag}: can not read {path}: its permissions forbid it")
    if size > MAX_BYTES:
        raise UsageError(f"{flag}: {path} has {size} bytes, more than {MAX_BYTES}: cut it up")


def read_npy(flag: str, path: Path) -> Array:
    """The array in a .npy file."""
    check_file(flag, path)
    try:
        found = np.load(path, allow_pickle=False)
    except BROKEN as error:
        raise _broken(flag, path, ".npy", error) from error
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
            _check_unpacked(flag, path, archive.zip)
            found = {name: np.asarray(archive[name]) for name in archive.files}
    except UsageError:
        raise
    except BROKEN as error:
        raise _broken(flag, path, ".npz", error) from error
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
    if not arrays:
        raise UsageError(f"{flag}: {path} has no array {names[0]!r}")
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


def _broken(flag: str, path: Path, suffix: str, error: BaseException) -> UsageError:
    """Without numpy's advice to open pickled objects all the same."""
    if "allow_pickle" in str(error):
        error = ValueError("pickled objects are never opened, save numbers with numpy.save")
    return UsageError(f"{flag}: {path} is no whole {suffix} file of numbers: {error}")


def _check_unpacked(flag: str, path: Path, archive: zipfile.ZipFile) -> None:
    size = sum(member.file_size for member in archive.infolist())
    if size > MAX_BYTES:
        raise UsageError(
            f"{flag}: {path} has {size} bytes unpacked, more than {MAX_BYTES}: cut it up"
        )


def _numbers(flag: str, what: str, array: Array) -> Array:
    if array.dtype.kind not in "iufb":
        raise UsageError(f"{flag}: {what} has dtype {array.dtype}: must be integers or floats")
    return array
