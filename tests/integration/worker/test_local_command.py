"""`moe-worker local` as a user runs it: comes up, answers, survives a lost rank, ends cleanly."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.worker_processes import free_network, wait_until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]
MODEL = Path("examples/tiny-moe")
RANKS = 2


class Command:
    def __init__(self, tmp_path: Path) -> None:
        self.network = free_network()
        self.output = tmp_path / "output"
        self.log_dir = tmp_path / "logs"
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "OMP_NUM_THREADS": "1",
        }
        arguments = [
            "local", "--model", str(MODEL), "--ranks", str(RANKS), "--network", self.network,
            "--redundant-slots", "6", "--log-dir", str(self.log_dir), "--rebalance", "Off",
        ]  # fmt: skip
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "moe_worker.main", *arguments],
                env=environment, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
        self.http = httpx.Client(trust_env=False, timeout=60.0)

    def said(self, text: str) -> bool:
        assert self.process.poll() is None, self.output.read_text()
        return text in self.output.read_text()

    def complete(self, member: int) -> str:
        """Asks again as long as the worker says "later": a plan is told before it is in force."""
        answers: list[httpx.Response] = []

        def answered() -> bool:
            answers.append(
                self.http.post(
                    f"http://{self.network}.{2 + member}:8000/v1/completions",
                    json={
                        "model": "tiny-moe", "prompt": "import os\n", "max_tokens": 8,
                        "temperature": 0,
                    },
                )
            )  # fmt: skip
            return "retry-after" not in answers[-1].headers

        wait_until(answered, "an answer", 60.0)
        assert answers[-1].status_code == 200, answers[-1].text
        return str(answers[-1].json()["choices"][0]["text"])

    def rank_pids(self) -> list[int]:
        """Of all processes that run a rank of this network."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    words = (entry / "cmdline").read_bytes().split(b"\0")
                except OSError:
                    continue  # it has just ended
                if b"serve" in words and any(w.startswith(self.network.encode()) for w in words):
                    found.append(int(entry.name))
        return sorted(found)


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Command]:
    command = Command(tmp_path)
    yield command
    command.http.close()
    if command.process.poll() is None:
        command.process.kill()
        command.process.wait()
    # The ranks end with their parent, however it ends.
    wait_until(lambda: not command.rank_pids(), "the ranks have ended", 30.0)


def test_a_group_serves_survives_a_killed_rank_and_ends_on_interrupt(command: Command) -> None:
    wait_until(lambda: command.said("serving:"), "the group serves", 600.0)
    text = command.complete(0)
    assert text
    assert command.complete(1) == text

    lost = [pid for pid in command.rank_pids() if f"{command.network}.3" in _words(pid)]
    os.kill(lost[0], signal.SIGKILL)
    wait_until(lambda: command.said("generation 2"), "the survivor goes on", 60.0)
    assert command.complete(0) == text
    wait_until(lambda: command.said("generation 3 epoch 3"), "the replacement joins", 240.0)
    assert command.complete(1) == text

    command.process.send_signal(signal.SIGINT)
    assert command.process.wait(60.0) == 0
    assert command.rank_pids() == []


def test_a_killed_parent_takes_its_ranks_along(command: Command) -> None:
    wait_until(lambda: len(command.rank_pids()) == RANKS, "the ranks are started", 60.0)
    command.process.kill()
    command.process.wait()
    # Checked by the fixture.


def test_a_folder_without_a_model_is_refused_in_one_line(tmp_path: Path) -> None:
    folder = tmp_path / ("a-folder-whose-name-is-long" * 4)
    ended = subprocess.run(
        [sys.executable, "-m", "moe_worker.main", "local", "--model", str(folder)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ended.returncode == 2
    [line] = ended.stdout.splitlines()
    assert f"{folder}/config.json" in line
    assert "Traceback" not in ended.stdout + ended.stderr


def _words(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
