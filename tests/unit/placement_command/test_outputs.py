"""Files that `moe-plan` writes: whole or not at all, and none over another."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from moe_placement.command import outputs
from moe_placement.command.usage import UsageError
from tests.support.moe_plan import Done, moe_plan, refused

ROOT = Path(__file__).resolve().parents[3]


def plan(folder: Path, *flags: object) -> Done:
    if not (folder / "L.npy").exists():
        np.save(folder / "L.npy", np.random.default_rng(0).lognormal(0, 1, (2, 8)))
    return moe_plan("plan", "--load", folder / "L.npy", "--ranks", 2, "--slots-per-rank", 5, *flags)


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "P.npz").write_bytes(b"before")

    def full(handle: int, mode: str) -> object:
        os.close(handle)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fdopen", full)
    refused(plan(tmp_path, "--output", tmp_path / "P.npz"), "--output", "No space left")
    assert (tmp_path / "P.npz").read_bytes() == b"before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["L.npy", "P.npz"]


def test_a_kill_while_it_writes_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "P.npz").write_bytes(b"before")
    code = (
        "import os, signal, pathlib\n"
        "from moe_placement.command import outputs\n"
        "os.chmod = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"outputs.write('--output', pathlib.Path({str(tmp_path / 'P.npz')!r}), b'after')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT / "core")},
        capture_output=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert (tmp_path / "P.npz").read_bytes() == b"before"


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real.npz").write_bytes(b"before")
    (tmp_path / "P.npz").symlink_to("real.npz")
    assert plan(tmp_path, "--output", tmp_path / "P.npz").code == 0
    assert (tmp_path / "P.npz").is_symlink()
    assert (tmp_path / "real.npz").read_bytes() != b"before"


def test_a_name_as_long_as_a_file_system_takes(tmp_path: Path) -> None:
    name = "x" * 251 + ".npz"
    assert plan(tmp_path, "--output", tmp_path / name).code == 0
    refused(plan(tmp_path, "--output", tmp_path / f"x{name}"), "--output", "name too long")


def test_a_pipe_is_no_place_for_a_plan(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "P.npz")
    refused(plan(tmp_path, "--output", tmp_path / "P.npz"), "--output", "pipe")


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ({"--output": "a", "--stats": "a"}, {}),
        ({"--output": "a", "--stats": "b", "--plot": "./b"}, {}),
        ({"--output": "a"}, {"--load": "a"}),
        ({"--plot": "link"}, {"TRACE": "a"}),
    ],
)
def test_one_file_for_two_flags(
    tmp_path: Path, written: dict[str, str], read: dict[str, str]
) -> None:
    (tmp_path / "link").symlink_to("a")
    with pytest.raises(UsageError, match="another name"):
        outputs.check_apart(
            {flag: tmp_path / name for flag, name in written.items()},
            {flag: tmp_path / name for flag, name in read.items()},
        )
    outputs.check_apart({"--output": tmp_path / "c", "--stats": None}, {"--load": tmp_path / "a"})


def test_a_plan_never_replaces_its_load(tmp_path: Path) -> None:
    np.savez(tmp_path / "L.npz", load=np.ones((2, 8)))
    before = (tmp_path / "L.npz").read_bytes()
    flags = ("--ranks", 2, "--slots-per-rank", 5, "--output", tmp_path / "L.npz")
    refused(moe_plan("plan", "--load", tmp_path / "L.npz", *flags), "--output", "--load")
    assert (tmp_path / "L.npz").read_bytes() == before


def test_a_plan_may_replace_the_one_in_force(tmp_path: Path) -> None:
    flags = ("--output", tmp_path / "P.npz")
    assert plan(tmp_path, *flags).code == 0
    assert plan(tmp_path, "--current", tmp_path / "P.npz", *flags).code == 0
