"""Of processes that want the same kernel one compiles it, and nobody waits for ever."""

from __future__ import annotations

import multiprocessing
import threading
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from moe_kernels import implementation

if "cpu" not in implementation.available():
    pytest.skip("numba is not installed", allow_module_level=True)

from moe_kernels.cpu.machine import description, vectors
from moe_kernels.cpu.turns import in_turn

DEADLINE_SECONDS = 60.0


def _hold(folder: Path, connection: Connection) -> None:
    with in_turn(folder, "Experts bfloat16") as held:
        connection.send(held)
        connection.recv()


def test_another_process_waits_until_the_turn_is_over(tmp_path: Path) -> None:
    here, there = multiprocessing.Pipe()
    other = multiprocessing.get_context("spawn").Process(target=_hold, args=(tmp_path, there))
    other.start()
    assert here.poll(DEADLINE_SECONDS)
    assert here.recv() is True
    with in_turn(tmp_path, "Experts bfloat16", patience_seconds=0.0) as held:
        assert not held
    with in_turn(tmp_path, "another", patience_seconds=0.0) as held:
        assert held
    got: list[bool] = []

    def wait() -> None:
        with in_turn(tmp_path, "Experts bfloat16", DEADLINE_SECONDS) as turn:
            got.append(turn)

    waiting = threading.Thread(target=wait)
    waiting.start()
    here.send("go on")
    waiting.join(DEADLINE_SECONDS)
    other.join(DEADLINE_SECONDS)
    assert got == [True]
    assert other.exitcode == 0


def test_the_turn_of_a_process_that_was_killed_is_over(tmp_path: Path) -> None:
    here, there = multiprocessing.Pipe()
    other = multiprocessing.get_context("spawn").Process(target=_hold, args=(tmp_path, there))
    other.start()
    assert here.poll(DEADLINE_SECONDS)
    other.kill()
    other.join(DEADLINE_SECONDS)
    with in_turn(tmp_path, "Experts bfloat16", DEADLINE_SECONDS) as held:
        assert held


def test_without_a_folder_everybody_compiles(tmp_path: Path) -> None:
    with in_turn(None, "attention") as held:
        assert not held
    with in_turn(tmp_path / "missing", "attention") as held:
        assert not held


@pytest.mark.parametrize(
    ("features", "said"),
    [
        ({"avx512f": True, "avx2": True, "fma": True}, "AVX-512"),
        ({"avx512f": False, "avx2": True, "fma": True}, "no AVX-512: .* AVX2 and FMA"),
        ({"neon": True}, "no AVX-512: .* NEON"),
        ({"sse2": True}, "neither .* slowly"),
    ],
)
def test_what_the_processor_lacks_is_said(features: dict[str, bool], said: str) -> None:
    from re import fullmatch

    assert fullmatch(f"{said}.*", vectors(features))
    assert "thread" in description()
