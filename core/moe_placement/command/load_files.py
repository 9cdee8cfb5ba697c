"""Expert loads from files: which formats are read, and what they mean.

| suffix | content |
|---|---|
| .npy | [layers, experts], or [windows, layers, experts] with a choice of windows |
| .npz | the same as `load` (or the only array); `experts` [layers] where layers differ in size |
| .npz | token routing (`token_routing`) |
| .json .yaml | rows per layer, which may differ in length; bare, or as `load` or `logical_count` |
| .json .yaml | expert counts: {"counts": {corpus: rows per layer}} |
| .json .jsonl .yaml | one or several LoadReports (`load_reports`) |

NaN never stands for "no such expert": a load is finite and not negative. Neighbours: `arrays` and
`texts` open the files, `trace_files` reads the same ones as a series of windows.

Shapes: W windows, L MoE layers, E logical experts.
"""

from __future__ import annotations

import reprlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moe_placement import score
from moe_placement.command import arrays, load_reports, texts, token_routing
from moe_placement.command.arrays import Array
from moe_placement.command.choice import Choice, WindowsWLE
from moe_placement.command.usage import UsageError
from moe_placement.placement import ExpertsL
from moe_placement.score import LoadLE

SUFFIXES = ".npy, .npz, .json, .jsonl or .yaml"
MAX_LAYERS = 1024
MIN_TOKENS, MAX_TOKENS = 2.0**-64, 2.0**64
"""Of an expert that has load: no counter counts further, and sums and quotients stay numbers."""
KEYS = ("load", "logical_count")


@dataclass(frozen=True, eq=False)
class Load:
    load_LE: LoadLE
    """Tokens an expert got; 0 where a layer has no such expert."""
    experts_L: ExpertsL
    """Experts of each layer."""


def read_load(flag: str, path: Path, choice: Choice) -> Load:
    """The load in a file of any format of this module.

    Raises:
        UsageError: naming `flag`, the file and what is wrong with it.
    """
    if path.suffix == ".npy":
        return _of_array(flag, path, arrays.read_npy(flag, path), None, choice)
    if path.suffix == ".npz":
        found = arrays.read_npz(flag, path)
        if token_routing.is_routing(found):
            windows = token_routing.windows(flag, path, found, choice)
            return checked(flag, path, added(choice.cut(flag, path, windows)))
        experts = found.pop("experts", None)
        return _of_array(flag, path, arrays.pick(flag, path, found, *KEYS), experts, choice)
    if path.suffix in texts.SUFFIXES:
        return _of_document(flag, path, texts.read_text(flag, path), choice)
    raise unknown_suffix(flag, path)


def unknown_suffix(flag: str, path: Path) -> UsageError:
    pickled = " (a .pt or .pkl file is pickled code: save its array with numpy.save)"
    hint = pickled if path.suffix in (".pt", ".pth", ".pkl") else ""
    return UsageError(f"{flag}: {path} must end in {SUFFIXES}{hint}")


def of_rows(flag: str, path: Path, rows: Any) -> Load:
    """Rows per layer, which may differ in length."""
    if not isinstance(rows, list) or not rows or not all(isinstance(row, list) for row in rows):
        raise UsageError(f"{flag}: {path}: expected a list with a row of token counts per layer")
    _check_size(flag, path, len(rows), max(map(len, rows)))
    for layer, row in enumerate(rows):
        for expert, value in enumerate(row):
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise UsageError(
                    f"{flag}: {path}: layer {layer}, expert {expert} is {reprlib.repr(value)}: "
                    "must be a number of tokens"
                )
            if value > MAX_TOKENS:  # may be too large for an array
                raise _beyond(flag, path, layer, expert)
    experts_L = np.array([len(row) for row in rows], dtype=np.int64)
    load_LE = np.zeros((len(rows), int(experts_L.max())))
    for layer, row in enumerate(rows):
        load_LE[layer, : len(row)] = row
    return checked(flag, path, load_LE, experts_L)


def corpora(flag: str, path: Path, document: Any, choice: Choice) -> list[Load] | None:
    """The loads of the chosen corpora in a document of expert counts; None when it is none."""
    counts = document.get("counts") if isinstance(document, dict) else None
    if not isinstance(counts, dict) or not counts:
        return None
    loads = [of_rows(flag, path, counts[name]) for name in choice.names(flag, path, list(counts))]
    if any(not np.array_equal(load.experts_L, loads[0].experts_L) for load in loads):
        raise UsageError(f"{flag}: {path}: its corpora differ in experts: choose with --corpus")
    return loads


def checked(flag: str, path: Path, load: Array, experts_L: ExpertsL | None = None) -> Load:
    """`load` as a Load, when it can be one."""
    try:
        load_LE = score.check_load(load)
    except ValueError as error:
        raise UsageError(f"{flag}: {path}: {error}") from error
    num_layers, num_experts = load_LE.shape
    _check_size(flag, path, num_layers, num_experts)
    beyond_LE = (load_LE > MAX_TOKENS) | ((load_LE > 0) & (load_LE < MIN_TOKENS))
    if beyond_LE.any():
        raise _beyond(flag, path, *divmod(int(beyond_LE.argmax()), num_experts))
    if experts_L is None:
        experts_L = np.full(num_layers, num_experts, dtype=np.int64)
    if experts_L.shape != (num_layers,):
        raise UsageError(
            f"{flag}: {path}: experts has shape {experts_L.shape}, not ({num_layers},)"
        )
    for layer, experts in enumerate(experts_L.tolist()):
        if not 1 <= experts <= num_experts:
            raise UsageError(
                f"{flag}: {path}: layer {layer} has {experts} experts: must be 1 to {num_experts}"
            )
        if load_LE[layer, experts:].any():
            raise UsageError(
                f"{flag}: {path}: layer {layer} has {experts} experts, but load beyond them"
            )
    return Load(load_LE, experts_L)


def _check_size(flag: str, path: Path, num_layers: int, num_experts: int) -> None:
    if not 1 <= num_layers <= MAX_LAYERS or not 1 <= num_experts <= token_routing.MAX_EXPERTS:
        raise UsageError(
            f"{flag}: {path} has shape {(num_layers, num_experts)}: expected 1 to {MAX_LAYERS} "
            f"layers of 1 to {token_routing.MAX_EXPERTS} experts"
        )


def _beyond(flag: str, path: Path, layer: int, expert: int) -> UsageError:
    return UsageError(
        f"{flag}: {path}: load of layer {layer}, expert {expert} is not 0 and not {MIN_TOKENS:g} "
        f"to {MAX_TOKENS:g} tokens: scale it, a load is counted in tokens"
    )


def added(windows_WLE: WindowsWLE) -> LoadLE:
    """The sum of windows; infinite where no number is as large, which `checked` refuses."""
    with np.errstate(over="ignore"):
        return np.asarray(windows_WLE.sum(axis=0))


def _of_document(flag: str, path: Path, document: Any, choice: Choice) -> Load:
    reports = load_reports.find(flag, path, document)
    if reports is not None:
        choice.only(flag, path)
        return of_rows(flag, path, load_reports.total(reports))
    loads = corpora(flag, path, document, choice)
    choice.only(flag, path, *([] if loads is None else ["corpora"]))
    if loads is not None:
        return Load(np.sum([load.load_LE for load in loads], axis=0), loads[0].experts_L)
    if isinstance(document, dict):
        for key in KEYS:
            if key in document:
                return of_rows(flag, path, document[key])
        raise UsageError(
            f"{flag}: {path} has {', '.join(map(str, list(document)[:6])) or 'nothing'}: "
            f"expected LoadReports, counts, {' or '.join(KEYS)}"
        )
    return of_rows(flag, path, document)


def _of_array(flag: str, path: Path, array: Array, experts: Array | None, choice: Choice) -> Load:
    choice.only(flag, path, *(["windows"] if array.ndim == 3 else []))
    if array.ndim == 3 and len(array):
        if choice.windows is None and len(array) > 1:
            raise UsageError(
                f"{flag}: {path} holds {len(array)} windows [windows, layers, experts]: choose "
                f"with --windows, 0:{len(array)} adds up all of them"
            )
        array = added(choice.cut(flag, path, np.asarray(array, dtype=np.float64)))
    if experts is None:
        return checked(flag, path, array)
    return checked(flag, path, array, arrays.whole_numbers(flag, f"{path}: experts", experts))
