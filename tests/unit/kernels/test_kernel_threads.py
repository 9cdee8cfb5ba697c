"""Threads that share a kernel: every part is done once, whoever comes, and nobody is waited for."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from moe_kernels.cpu import team
from moe_kernels.cpu.atomics import fetch_add, linger, look
from moe_kernels.cpu.jit import Array, Index, compiled, inner
from moe_kernels.cpu.parts import cut, meet, new_board, parts_for, take, take_next
from moe_kernels.cpu.team import together

NUM_PHASES = 5
DEADLINE_SECONDS = 60.0
ENTERED, LEFT = 0, 8


@compiled
def count_parts(counts_FP: Array, ends_F: Array, visits: Array, threads: int) -> None:
    """Adds one to each part of each phase, and counts the parts that find the one before done."""
    together(_walk, threads, new_board(counts_FP.shape[0]), counts_FP, ends_F, visits)


@inner
def _walk(board: Array, counts_FP: Array, ends_F: Array, visits: Array) -> None:
    fetch_add(visits, np.int64(ENTERED), np.int64(1))
    parts = counts_FP.shape[1]
    for phase in range(counts_FP.shape[0]):
        part: Index = take(board, phase)
        while part < parts:
            if phase > 0:
                is_complete = counts_FP[phase - 1].sum() == parts
                fetch_add(ends_F, np.int64(phase - 1), np.int64(is_complete))
            if part == parts - 1:
                dawdle(visits)
            counts_FP[phase, part] += 1
            part = take_next(board, phase)
        meet(board, phase, parts)
    dawdle(visits)
    fetch_add(visits, np.int64(LEFT), np.int64(1))


@compiled
def dawdle(visits: Array) -> None:
    """Some microseconds."""
    for _ in range(300):
        look(visits, np.int64(ENTERED))
        linger(0)


def check_counts(threads: int, num_parts: int = 7) -> None:
    counts_FP = np.zeros((NUM_PHASES, num_parts), np.int64)
    ends_F, visits = np.zeros(NUM_PHASES - 1, np.int64), np.zeros(16, np.int64)
    count_parts(counts_FP, ends_F, visits, threads)
    assert visits[ENTERED] == visits[LEFT], "nobody is inside any more"
    assert (counts_FP == 1).all(), "each part once"
    assert (ends_F == num_parts).all(), "all parts find the phase before complete"


@pytest.fixture
def several_threads(monkeypatch: pytest.MonkeyPatch) -> int:
    """More than this machine has processors, so that some are late."""
    monkeypatch.setattr(team, "MOST_THREADS", 6)
    before = torch.get_num_threads()
    torch.set_num_threads(6)
    threads = team.num_threads()
    torch.set_num_threads(before)
    return threads


@pytest.mark.parametrize("num_parts", [1, 3, 64])
def test_every_part_is_done_once_and_phases_follow_each_other(
    several_threads: int, num_parts: int
) -> None:
    for threads in range(1, several_threads + 1):
        for _ in range(200):
            check_counts(threads, num_parts)


def test_callers_at_the_same_time_do_not_disturb_each_other(several_threads: int) -> None:
    errors: list[AssertionError] = []

    def call() -> None:
        try:
            for _ in range(500):
                check_counts(several_threads)
        except AssertionError as error:
            errors.append(error)

    callers = [threading.Thread(target=call) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(DEADLINE_SECONDS)
    assert not any(caller.is_alive() for caller in callers)
    assert not errors


def test_members_that_sleep_are_woken(several_threads: int) -> None:
    for _ in range(3):
        deadline = time.monotonic() + DEADLINE_SECONDS
        while team.num_asleep() < several_threads - 1:
            assert time.monotonic() < deadline, "members sleep when there is nothing to do"
            time.sleep(0.001)
        check_counts(several_threads)
        while team.num_asleep() >= several_threads - 1 and team.num_asleep():
            check_counts(several_threads)
            assert time.monotonic() < deadline, "a call wakes them"


def test_a_call_does_not_need_its_members(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where other work has all other processors."""
    check_counts(threads=64)


@pytest.mark.usefixtures("several_threads")
def test_a_child_process_goes_on_alone() -> None:
    context = multiprocessing.get_context("fork")
    check_counts(6)
    child = context.Process(target=_in_child)
    child.start()
    child.join(DEADLINE_SECONDS)
    assert child.exitcode == 0
    check_counts(6)


def _in_child() -> None:
    check_counts(6)
    os._exit(0)


@pytest.mark.usefixtures("two_threads")
def test_kernels_take_torchs_number_as_far_as_there_are_processors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(team, "MOST_THREADS", 1)
    assert team.num_threads() == 1
    monkeypatch.undo()
    assert team.num_threads() == min(2, team.MOST_THREADS)
    torch.set_num_threads(1)
    assert team.num_threads() == 1


def test_a_process_ends_while_members_look_for_work() -> None:
    """They run code that goes away with the interpreter."""
    code = "\n".join(
        [
            "import torch",
            "from moe_kernels.cpu import team",
            "team.MOST_THREADS = 4",
            "torch.set_num_threads(4)",
            "print(team.num_threads(), torch.get_num_threads())",
        ]
    )
    root = Path(team.__file__).parents[2]
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            cwd=root,
            timeout=DEADLINE_SECONDS,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == ["4", "4"], done.stderr


def test_rooms_are_cut_without_overlap() -> None:
    @compiled
    def shapes(room: Array) -> tuple[Array, Array, Array]:
        first, rest = cut(room, (2, 3))
        second, rest = cut(rest, (0, 5))
        return first, second, rest

    room = np.arange(10)
    first, second, rest = shapes(room)
    assert first.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert second.shape == (0, 5)
    assert rest.tolist() == [6, 7, 8, 9]


def test_one_thread_has_one_part() -> None:
    assert parts_for(1) == 1
    assert parts_for(4) % 4 == 0
