"""Which implementation of the operations this process uses; one switch, thrown once at its start.

An operation's contract is a function in `moe_kernels/<operation>.py`, marked `@implemented`: its
signature and docstring say what every implementation computes, its body calls the reference. The
others are functions of the same name and signature in a module of the same name below the package
of the implementation, as in `moe_kernels/cpu/linear.py`. Where an implementation has no such
function the contract's body runs, so that one can grow operation by operation.

`reference` is plain torch, the oracle, on any device; `cpu` is compiled by numba; `gpu` is Triton.
Nothing of an implementation is imported before it is chosen.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal, ParamSpec, TypeVar, cast, get_args

Name = Literal["reference", "cpu", "gpu"]
NAMES: tuple[Name, ...] = get_args(Name)
VARIABLE = "MOE_KERNELS"

_NEEDS: dict[Name, str] = {"cpu": "numba", "gpu": "triton"}
_DEVICES: dict[str, tuple[Name, ...]] = {"cpu": ("reference", "cpu"), "cuda": ("reference", "gpu")}
"""What auto chooses from, the fastest last."""

P = ParamSpec("P")
R = TypeVar("R")

log = logging.getLogger(__name__)
_chosen: Name | None = None
_watcher: Watcher | None = None


class UnknownImplementation(ValueError):
    """The name is none of `NAMES`, nor auto."""


class ImplementationUnavailable(ValueError):
    """This machine or installation cannot run the implementation."""


def chosen() -> Name:
    """The implementation in force; the variable MOE_KERNELS decides where nobody selected one."""
    return _chosen or select(os.environ.get(VARIABLE) or "reference")


def select(wanted: str, device: str | None = None) -> Name:
    """Put one in force for the whole process: a name, or auto for the fastest that runs here.

    With a `device` (cpu, cuda) auto chooses among those that compute on it.

    Raises:
        UnknownImplementation, ImplementationUnavailable: with the names that can be given.
    """
    global _chosen
    _chosen = _fastest(device) if wanted == "auto" else _named(wanted)
    log.info("kernels: %s", description())
    return _chosen


def description() -> str:
    """The one in force, and how it uses this machine where it has something to say about that."""
    name = chosen()
    own = _own(name, "machine", "description")
    return name if own is None else f"{name}, {own()}"


@contextmanager
def using(wanted: str, device: str | None = None) -> Iterator[None]:
    """For tests and comparisons, while nothing else runs: another one in force for a while."""
    global _chosen
    before = _chosen
    select(wanted, device)
    try:
        yield
    finally:
        _chosen = before


@dataclass(frozen=True)
class Call:
    """One call of a contract, not yet run."""

    operation: str
    function: str
    args: tuple[Any, ...]
    run: Callable[[], Any]
    """By the implementation in force."""
    compose: Callable[[], Any]
    """By the contract's body: of an operation made of others, those one after the other."""


Watcher = Callable[[Call], Any]
"""Runs the call, one way or the other, and returns its result."""


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """For profiles: every call of any thread goes through `watcher` for a while."""
    global _watcher
    _watcher = watcher
    try:
        yield
    finally:
        _watcher = None


def available() -> tuple[Name, ...]:
    """Those that can run here, the oracle first."""
    return tuple(name for name in NAMES if _hindrance(name) is None)


def has_own(name: Name, operation: str, function: str) -> bool:
    """Whether `name` computes it itself and does not leave it to the reference."""
    return name != "reference" and _own(name, operation, function) is not None


def implemented(contract: Callable[P, R]) -> Callable[P, R]:
    """Make `contract` run by the implementation in force."""
    operation, function = contract.__module__.rpartition(".")[2], contract.__name__
    found: dict[Name, Callable[P, R]] = {"reference": contract}

    @wraps(contract)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        name = chosen()
        if name not in found:
            own = _own(name, operation, function)
            found[name] = contract if own is None else cast("Callable[P, R]", own)
        if _watcher is None:
            return found[name](*args, **kwargs)
        call = Call(
            operation, function, args,
            partial(found[name], *args, **kwargs), partial(contract, *args, **kwargs),
        )  # fmt: skip
        return cast("R", _watcher(call))

    return run


def _named(wanted: str) -> Name:
    for name in NAMES:
        if wanted == name:
            hindrance = _hindrance(name)
            if hindrance is not None:
                raise ImplementationUnavailable(
                    f"kernels {wanted!r}: {hindrance}; {', '.join(available())} can run here"
                )
            return name
    raise UnknownImplementation(f"kernels {wanted!r}: must be auto, {', '.join(NAMES)}")


def _fastest(device: str | None) -> Name:
    candidates = NAMES if device is None else _DEVICES[device]
    for name in reversed(candidates):
        hindrance = _hindrance(name)
        if hindrance is None and name == "gpu" and is_interpreted():
            hindrance = "interpreted kernels are for tests"
        if hindrance is None:
            return name
        if device is not None:
            log.warning("kernels %s are not used: %s", name, hindrance)
    raise AssertionError("the reference runs everywhere")


def _hindrance(name: Name) -> str | None:
    """Why `name` cannot run here."""
    if name == "reference":
        return None
    if find_spec(f"moe_kernels.{name}") is None:
        return "this build does not have it"
    if find_spec(_NEEDS[name]) is None:
        return f"needs the package {_NEEDS[name]}, which is not installed"
    try:
        import_module(_NEEDS[name])
    except ImportError as error:
        return f"the package {_NEEDS[name]} cannot be imported: {error}"
    if name == "gpu":
        # The one thing here that needs torch, and only where GPU kernels could run at all.
        import torch

        if not torch.cuda.is_available() and not is_interpreted():
            return "there is no GPU"
    return None


def is_interpreted() -> bool:
    """Whether kernels of `gpu` are to run in Triton's interpreter, on a CPU and for tests: the
    variable is Triton's own."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _own(name: Name, operation: str, function: str) -> Callable[..., object] | None:
    module = f"moe_kernels.{name}.{operation}"
    if find_spec(module) is None:
        return None
    own: Callable[..., object] | None = getattr(import_module(module), function, None)
    return own
