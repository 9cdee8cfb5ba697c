"""`moe-plan` as a process: help, exit codes, pipes, terminals, Ctrl-C, missing libraries."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from moe_placement.command import main
from tests.support.moe_plan import moe_plan

ROOT = Path(__file__).resolve().parents[3]
DEADLINE_SECONDS = 60
COMMANDS = [module.__name__.rpartition(".")[2] for module in main.COMMANDS]


def environment(**changes: str) -> dict[str, str]:
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in ("COLUMNS", "NO_COLOR", "FORCE_COLOR", "TERM")
    }
    return {**inherited, "PYTHONPATH": str(ROOT / "core"), "TERM": "xterm-256color", **changes}


def start(*arguments: object, code: str = "", **options: object) -> subprocess.Popen[bytes]:
    """`python -m moe_placement`, after the statements in `code`."""
    program = f"{code}\nfrom moe_placement.command.main import main\nmain()"
    return subprocess.Popen(  # type: ignore[call-overload,no-any-return]
        [sys.executable, "-W", "error", "-c", program, *map(str, arguments)],
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": environment(), **options},
    )


def finish(process: subprocess.Popen[bytes]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=DEADLINE_SECONDS)
    return process.returncode, (out or b"").decode(), err.decode()


@pytest.fixture
def load(tmp_path: Path) -> Path:
    np.save(tmp_path / "L.npy", np.random.default_rng(0).lognormal(0, 1, (4, 16)))
    return tmp_path / "L.npy"


def plan_flags(load: Path) -> list[object]:
    return ["plan", "--load", load, "--ranks", 4, "--slots-per-rank", 5]


def test_python_m_is_the_same_command(load: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "moe_placement", *map(str, plan_flags(load)), "--json"],
        capture_output=True, env=environment(), timeout=DEADLINE_SECONDS, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"gap_worst" in done.stdout


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_teaches_with_examples(command: str) -> None:
    done = moe_plan(*filter(None, [command]), "--help")
    assert done.code == 0
    assert "examples:" in done.out
    assert done.out.count("moe-plan") >= 2


@pytest.mark.parametrize("arguments", [(), ("nonsense",)])
def test_a_command_must_be_given(arguments: tuple[str, ...]) -> None:
    done = moe_plan(*arguments)
    assert done.code == 2
    assert done.err.count("\n") == 1


def test_a_closed_pipe_is_no_error(load: Path) -> None:
    for arguments in (plan_flags(load), ["plan", "--help"]):
        reader, writer = os.pipe()
        os.close(reader)
        process = start(*arguments, stdout=writer)
        os.close(writer)
        _, err = process.communicate(timeout=DEADLINE_SECONDS)
        assert (process.returncode, err) == (0, b"")


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_stdout_on_a_full_disk(load: Path, more: tuple[str, ...]) -> None:
    with open("/dev/full", "wb") as full:
        code, _, err = finish(start(*plan_flags(load), *more, stdout=full))
    assert (code, err) == (2, "moe-plan: can not write to stdout: No space left on device\n")


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
@pytest.mark.parametrize("ranks", [4, 1])
def test_a_closed_stream(load: Path, closed: str, ranks: int) -> None:
    """What one cannot say does not end up in the other."""
    flags = ["plan", "--load", load, "--ranks", ranks, "--slots-per-rank", 5]
    process = start(*flags, code=f"import sys; sys.{closed}.close(); sys.{closed} = None")
    code, out, err = finish(process)
    assert code == (0 if ranks == 4 else 2)
    assert bool(out) == (closed == "stderr" and code == 0)
    assert bool(err) == (closed == "stdout" and code == 2)
    assert "Traceback" not in err


def test_memory_that_is_not_there(load: Path) -> None:
    none_left = (
        "import moe_placement.planner as planner\n"
        "def plan(*_):\n"
        "    raise MemoryError\n"
        "planner.plan = plan\n"
    )
    code, out, err = finish(start(*plan_flags(load), code=none_left))
    assert (code, out, err.count("\n")) == (2, "", 1)


def test_interrupted(load: Path) -> None:
    slow = (
        "import time, sys, moe_placement.planner as planner\n"
        "def plan(*_):\n"
        "    print('planning', file=sys.stderr, flush=True)\n"
        "    time.sleep(60)\n"
        "planner.plan = plan\n"
    )
    process = start(*plan_flags(load), code=slow)
    assert process.stderr is not None
    assert process.stderr.readline() == b"planning\n"
    process.send_signal(signal.SIGINT)
    code, out, err = finish(process)
    assert (code, out, err) == (130, "", "")


SLOWLY = (
    "import time, moe_placement.planner as planner\n"
    "fast = planner.plan\n"
    "def plan(*arguments):\n"
    "    time.sleep(1.5)\n"
    "    return fast(*arguments)\n"
    "planner.plan = plan\n"
)


def on_terminal(*arguments: object, code: str = "", **changes: str) -> tuple[int, bytes]:
    """Exit code, and everything that a terminal got on stdout and stderr."""
    leader, follower = pty.openpty()
    process = start(
        *arguments, code=code, stdout=follower, stderr=follower, stdin=follower,
        env=environment(**changes),
    )  # fmt: skip
    os.close(follower)
    shown, deadline = b"", time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < deadline:
        if not select.select([leader], [], [], 1.0)[0]:
            continue
        try:
            chunk = os.read(leader, 65536)
        except OSError:  # the other side is closed
            break
        if not chunk:
            break
        shown += chunk
    os.close(leader)
    return process.wait(timeout=DEADLINE_SECONDS), shown


def test_a_bar_shows_that_a_long_run_is_alive(load: Path) -> None:
    code, shown = on_terminal(*plan_flags(load), code=SLOWLY)
    assert code == 0
    assert b"planning 4 layers on 4 ranks" in shown
    code, shown = on_terminal(*plan_flags(load))
    assert b"planning 4 layers on 4 ranks" not in shown


def test_no_bar_where_nobody_watches(load: Path) -> None:
    code, _, err = finish(start(*plan_flags(load), code=SLOWLY))
    assert (code, err) == (0, "")


def test_colours_on_a_terminal_unless_unwanted(load: Path) -> None:
    assert b"\x1b[3" in on_terminal(*plan_flags(load))[1]
    assert b"\x1b[3" not in on_terminal(*plan_flags(load), NO_COLOR="1")[1]


@pytest.mark.parametrize("columns", ["60", "110"])
def test_the_width_asked_for(load: Path, columns: str) -> None:
    _, out, _ = finish(start(*plan_flags(load), env=environment(COLUMNS=columns)))
    assert max(map(len, out.splitlines())) <= int(columns)


def test_a_terminal_that_knows_only_ascii(load: Path) -> None:
    changed = environment(PYTHONIOENCODING="ascii")
    code, out, err = finish(start(*plan_flags(load), env=changed))
    assert (code, err) == (0, "")
    assert "?" in out


BLOCK = "import sys; sys.modules[{!r}] = None"


def test_without_rich_programs_still_get_figures(load: Path) -> None:
    blocked = BLOCK.format("rich.console")
    code, out, err = finish(start(*plan_flags(load), "--json", code=blocked))
    assert (code, err) == (0, "")
    assert "gap_worst" in out
    code, out, err = finish(start(*plan_flags(load), code=blocked))
    assert (code, out) == (2, "")
    assert err == "moe-plan: tables need rich: pip install 'moe-operator[plan]', or use --json\n"


def test_without_matplotlib_the_extra_is_named(load: Path, tmp_path: Path) -> None:
    blocked = BLOCK.format("matplotlib")
    flags = [*plan_flags(load), "--plot", tmp_path / "heat.png", "--output", tmp_path / "P.npz"]
    code, out, err = finish(start(*flags, code=blocked))
    assert (code, out) == (2, "")
    assert err == "moe-plan: --plot needs matplotlib: pip install 'moe-operator[plot]'\n"
    assert not (tmp_path / "P.npz").exists()
    assert finish(start(*plan_flags(load), code=blocked))[0] == 0


def test_drawing_libraries_are_loaded_only_to_draw(load: Path) -> None:
    told = (
        "import atexit, sys\n"
        "atexit.register(lambda: print(*[name for name in ('rich', 'matplotlib', 'yaml', 'torch')"
        " if name in sys.modules], file=sys.stderr))"
    )
    _, _, err = finish(start(*plan_flags(load), "--json", code=told))
    assert err.split() == ["yaml"]


def test_algorithms_import_neither_numbers_of_others_nor_screens() -> None:
    names = sorted(
        path.stem for path in (ROOT / "core/moe_placement").glob("*.py") if path.stem[:2] != "__"
    )
    blocked = ("rich", "matplotlib", "scipy", "torch", "yaml", "argparse")
    code = "import importlib, sys\n" + "".join(f"sys.modules[{n!r}] = None\n" for n in blocked)
    code += f"[importlib.import_module('moe_placement.' + name) for name in {names}]"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
