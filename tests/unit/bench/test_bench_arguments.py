"""Flags become options; what does not fit is told in one line, before anything is sent."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from moe_worker import bench
from moe_worker.bench.arguments import ENV_API_KEY, MAX_REQUESTS, add_arguments, options_of
from moe_worker.bench.arrivals import ClosedLoop, OpenLoop
from moe_worker.bench.bench_error import BenchError
from moe_worker.bench.lengths import Lengths
from moe_worker.bench.options import Options
from moe_worker.bench.prompts import Synthetic
from moe_worker.bench.session import check_open_files, check_writable
from moe_worker.main import build_parser

URL = "http://127.0.0.2:8000"


def options(*flags: str, environment: dict[str, str] | None = None) -> Options:
    parser = argparse.ArgumentParser()
    add_arguments(parser, environment or {})
    return options_of(parser.parse_args(["--url", URL, *flags]))


def test_a_url_is_enough() -> None:
    found = options()
    assert found.base_url == f"{URL}/v1"
    assert found.traffic == ClosedLoop(8)
    assert found.num_requests == 100
    assert found.prompts == Synthetic(Lengths(128, 128), 0)
    assert found.api_key is None
    assert not found.objective


def test_traffic_is_open_or_closed() -> None:
    assert options("--concurrency", "3").traffic == ClosedLoop(3)
    assert options("--rate", "2.5").traffic == OpenLoop(2.5, 256)
    assert options("--rate", "2.5", "--max-connections", "9").traffic == OpenLoop(2.5, 9)
    with pytest.raises(BenchError, match="--max-connections is for --rate"):
        options("--max-connections", "9")


def test_a_duration_alone_ends_a_run() -> None:
    assert options("--duration", "5").num_requests == MAX_REQUESTS
    both = options("--duration", "5", "--requests", "7")
    assert (both.duration_seconds, both.num_requests) == (5.0, 7)


def test_objectives_are_milliseconds_on_the_command_line() -> None:
    objective = options("--slo-ttft-ms", "250", "--slo-itl-ms", "40").objective
    assert (objective.ttft_seconds, objective.itl_seconds) == (0.25, 0.04)


def test_flags_of_synthetic_prompts_exclude_a_file() -> None:
    with pytest.raises(BenchError, match="--prompt-tokens is for synthetic prompts"):
        options("--prompts", "x.txt", "--prompt-tokens", "5")
    with pytest.raises(BenchError, match="--shared-prefix-tokens is for synthetic prompts"):
        options("--prompts", "x.txt", "--shared-prefix-tokens", "5")


def test_a_key_comes_from_flag_file_or_environment_and_is_never_told(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("of-file\n")
    environment = {ENV_API_KEY: "of-environment"}
    assert options(environment=environment).api_key == "of-environment"
    assert options("--api-key", "of-flag", environment=environment).api_key == "of-flag"
    by_file = options("--api-key-file", str(path), environment=environment)
    assert by_file.api_key == "of-file"
    assert "of-file" not in str(by_file.setting("m"))
    for bad in ("two words", "schlüssel", "a\nb"):
        with pytest.raises(BenchError) as refused:
            options("--api-key", bad)
        assert bad not in str(refused.value)
    with pytest.raises(BenchError, match="can not read it"):
        options("--api-key-file", str(tmp_path / "missing"))


@pytest.mark.parametrize(
    "flags",
    [
        ["--concurrency", "0"],
        ["--concurrency", "5000"],
        ["--rate", "0"],
        ["--rate", "nan"],
        ["--rate", "1", "--concurrency", "1"],
        ["--requests", "1.5"],
        ["--requests", "²"],
        ["--duration", "0"],
        ["--timeout", "-1"],
        ["--max-tokens", "uniform:9,1"],
        ["--endpoint", "embeddings"],
        ["--url", "localhost:8000"],
    ],
)
def test_values_out_of_bounds_are_refused_by_flag(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        options(*flags)
    assert ended.value.code == 2
    assert flags[0] in capsys.readouterr().err


def test_the_command_has_bench_and_its_help_tells_of_coordinated_omission(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parser = build_parser({ENV_API_KEY: "secret-of-environment"})
    assert parser.parse_args(["bench", "--url", URL]).run is bench.run
    with pytest.raises(SystemExit):
        parser.parse_args(["bench", "--help"])
    shown = capsys.readouterr().out
    assert "no coordinated omission" in shown
    assert "secret-of-environment" not in shown


def test_a_result_that_can_not_be_written_is_refused_before(tmp_path: Path) -> None:
    check_writable(None)
    check_writable(Path("-"))
    check_writable(tmp_path / "new.json")
    assert not (tmp_path / "new.json").exists()
    for path in (tmp_path, tmp_path / "missing" / "new.json"):
        with pytest.raises(BenchError, match="--json: can not write"):
            check_writable(path)


def test_connections_beyond_the_open_files_are_refused() -> None:
    check_open_files(100, 1024)
    check_open_files(4096, -1)  # unlimited
    with pytest.raises(BenchError, match="ulimit -n 1064"):
        check_open_files(1000, 1024)
