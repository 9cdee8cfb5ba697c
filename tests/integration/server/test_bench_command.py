"""`moe-worker bench` against our own server and a real worker."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from moe_worker.main import build_parser
from tests.support.fake_engine import CACHED_TOKENS, FakeEngine
from tests.support.http_worker import MODEL_NAME, HttpWorker, http_worker
from tests.support.raw_server import STREAM_HEAD, RawServer, raw_server, stay_silent
from tests.support.served_model import serving_worker
from tests.support.until import until
from tests.support.worker_command import ROOT, SOURCE_ROOTS

LETTER = ord("x")


def for_ever(prompt: Sequence[int]) -> Any:
    return itertools.repeat(LETTER)


def engine(**more: Any) -> FakeEngine:
    return FakeEngine(for_ever, max_model_len=4096, **more)


def bench(url: str, *flags: str, folder: Path) -> tuple[int, dict[str, Any]]:
    """Exit code and JSON result of a run in this process."""
    path = folder / "result.json"
    parsed = build_parser({}).parse_args(["bench", "--url", url, "--json", str(path), *flags])
    code = parsed.run(parsed)
    return code, json.loads(path.read_text())


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_a_closed_loop_is_measured_and_told(
    endpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with http_worker(engine()) as worker:
        code, found = bench(
            worker.public_url, "--requests", "12", "--concurrency", "3", "--max-tokens", "5",
            "--warmup", "2", "--endpoint", endpoint, "--slo-ttft-ms", "60000", folder=tmp_path,
        )  # fmt: skip
        assert worker.outcomes() == {"length": 16}  # two probes, two before, twelve measured
    assert code == 0
    assert found["setting"]["model"] == MODEL_NAME
    assert found["requests"]["outcomes"]["ok"] == 12
    assert found["tokens"]["output"] == 60
    assert found["tokens"]["cached"] == 12 * CACHED_TOKENS
    assert found["tokens"]["answers_without_usage"] == 0
    # A token of this model is a byte, and words are some bytes each: the probes found that out.
    assert found["tokens"]["input"] / 12 == pytest.approx(128, rel=0.08)
    assert found["latency_seconds"]["ttft"]["count"] == 12
    assert found["latency_seconds"]["itl"]["count"] == 48
    assert found["goodput"]["requests"] == 12
    shown = capsys.readouterr()
    assert "12 requests in" in shown.out
    assert "time to first token" in shown.out
    assert shown.err == ""  # no progress without a terminal


def test_an_open_loop_sends_what_a_seed_says(tmp_path: Path) -> None:
    fake = engine()
    with http_worker(fake) as worker:
        flags = ("--rate", "200", "--requests", "10", "--prompt-tokens", "uniform:40,90",
                 "--max-tokens", "uniform:1,9", "--shared-prefix-tokens", "30",
                 "--max-connections", "1")  # fmt: skip
        runs = []
        for seed in ("1", "1", "2"):
            begin = len(fake.submitted)
            code, found = bench(worker.public_url, *flags, "--seed", seed, folder=tmp_path)
            assert code == 0
            assert found["requests"]["outcomes"]["ok"] == 10
            assert found["latency_seconds"]["waited"]["max"] > 0
            runs.append([(ids, params.max_tokens) for ids, params in fake.submitted[begin:]])
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]
    measured = [prompt for prompt, _ in runs[0][2:]]  # after the probes
    assert len({prompt[:20] for prompt in measured}) == 1
    assert len(set(measured)) == 10


def refused_by_a_full_queue(
    fake: FakeEngine, worker: HttpWorker, *flags: str, folder: Path
) -> tuple[int, dict[str, Any]]:
    """Three users at once where two find room: the engine does nothing for them, once it has
    answered the probes, until the third was refused."""
    refused_before = worker.outcomes().get("rejected", 0)
    fake.hold()
    fake.step(2)

    def release() -> None:
        until(lambda: worker.outcomes().get("rejected", 0) > refused_before, "one is refused", 60)
        fake.release()

    releasing = threading.Thread(target=release)
    releasing.start()
    found = bench(
        worker.public_url, "--requests", "3", "--concurrency", "3", "--max-tokens", "4",
        *flags, folder=folder,
    )  # fmt: skip
    releasing.join()
    return found


def test_refusals_are_counted_or_waited_out(tmp_path: Path) -> None:
    fake = engine(max_running=1, max_queued=1)
    with http_worker(fake) as worker:
        code, found = refused_by_a_full_queue(fake, worker, folder=tmp_path)
        assert code == 1
        outcomes = {name: n for name, n in found["requests"]["outcomes"].items() if n}
        assert outcomes == {"ok": 2, "refused": 1}
        assert list(found["failures"]) == [
            "refused: 429: The queue of this worker is full. Try again later."
        ]
        code, _ = refused_by_a_full_queue(fake, worker, "--allow-failures", folder=tmp_path)
        assert code == 0
        code, found = refused_by_a_full_queue(fake, worker, "--retries", "20", folder=tmp_path)
        assert code == 0
        assert found["requests"]["outcomes"]["ok"] == 3
        assert found["requests"]["retries"] >= 1
        assert found["latency_seconds"]["ttft"]["max"] >= 2.0  # what the server asked to wait


def test_json_on_standard_output_is_alone_there(capsys: pytest.CaptureFixture[str]) -> None:
    with http_worker(engine()) as worker:
        parsed = build_parser({}).parse_args(
            ["bench", "--url", worker.public_url, "--json", "-", "--requests", "2"]
        )
        assert parsed.run(parsed) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["requests"]["started"] == 2
    assert "2 requests in" in shown.err


def test_a_server_that_is_not_there_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
    for flags in ([], ["--model", "m"]):
        parsed = build_parser({}).parse_args(["bench", "--url", url, *flags])
        assert parsed.run(parsed) == 2
        shown = capsys.readouterr()
        assert f"{url}/v1/" in shown.err
        assert "unreachable" in shown.err
        assert shown.out == ""


def test_a_model_that_does_not_exist_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    with http_worker(engine()) as worker:
        parsed = build_parser({}).parse_args(
            ["bench", "--url", worker.public_url, "--model", "other"]
        )
        assert parsed.run(parsed) == 2
    shown = capsys.readouterr()
    assert "'other'" in shown.err
    assert MODEL_NAME in shown.err


def interrupted(
    server: RawServer, num_requests: int, *flags: str
) -> tuple[int, str, str]:  # fmt: skip
    """Exit code and output of a process that gets Ctrl-C once so many requests have come."""
    path = os.pathsep.join(str(ROOT / root) for root in SOURCE_ROOTS)
    command = ["moe_worker.main", "bench", "--url", server.url, "--model", "m", *flags]
    with subprocess.Popen(
        [sys.executable, "-m", *command], cwd=ROOT, env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            until(lambda: len(server.requests) >= num_requests, "requests came", 60)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=30)
        finally:
            process.kill()
    return process.returncode, out, err


@pytest.mark.processes
def test_an_interrupt_tells_what_was_measured_so_far(tmp_path: Path) -> None:
    whole = b'data: {"choices":[{"text":"a","finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
    path = tmp_path / "result.json"

    def script(connection: socket.socket, index: int) -> None:
        if index < 4:  # a probe and three
            connection.sendall(STREAM_HEAD + whole)
        else:
            stay_silent(connection)

    with raw_server(script) as server:
        code, out, err = interrupted(server, 6, "--concurrency", "2", "--json", str(path))
    assert code == 130, err
    assert "5 requests in" in out
    assert "interrupted" in out
    found = json.loads(path.read_text())
    assert found["requests"]["outcomes"]["ok"] == 3
    assert found["requests"]["unfinished"] == 2
    assert "Traceback" not in err


@pytest.mark.processes
def test_an_interrupt_before_the_first_answer_says_so() -> None:
    with raw_server(lambda connection, index: stay_silent(connection)) as server:
        code, out, err = interrupted(server, 1)
    assert (code, out) == (130, "")
    assert err == "interrupted before anything was measured\n"


@pytest.mark.processes
def test_a_real_worker_is_measured(tmp_path: Path) -> None:
    with serving_worker(tmp_path) as worker:
        code, found = bench(
            worker.public_url, "--rate", "20", "--requests", "6", "--max-tokens", "6",
            "--ignore-eos", "--prompt-tokens", "100", "--shared-prefix-tokens", "64",
            folder=tmp_path,
        )  # fmt: skip
        assert code == 0, found["failures"]
        assert found["tokens"]["output"] == 36
        assert found["tokens"]["input"] / 6 == pytest.approx(100, rel=0.15)
        assert found["tokens"]["cached"] > 0
        assert worker.process.poll() is None
