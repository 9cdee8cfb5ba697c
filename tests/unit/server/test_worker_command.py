"""The flags of `moe-worker serve`: environment, files, and mistakes told in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from moe_api import names
from moe_worker.listener import AddressInUse, bind
from moe_worker.main import UsageError, build_parser, serve_settings
from moe_worker.serve import ServeSettings

ENVIRONMENT = {
    names.ENV_NAMESPACE: "prod",
    names.ENV_DEPLOYMENT: "mixtral",
    names.ENV_GROUP: "1",
    names.ENV_MEMBER: "3",
    names.ENV_POD_NAME: "mixtral-g1-m3-x",
    names.ENV_POD_UID: "uid-7",
    names.ENV_POD_IP: "10.1.2.3",
}


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    config = {"schema": 1, "model": {"path": "/m", "servedName": "m"}, "drainSeconds": 7}
    (tmp_path / "worker.json").write_text(json.dumps(config))
    (tmp_path / "token").write_text("secret\n")
    return ["--config", f"{tmp_path}/worker.json", "--control-token-file", f"{tmp_path}/token"]


def settings(arguments: list[str], environment: dict[str, str] | None = None) -> ServeSettings:
    return serve_settings(build_parser(environment or {}).parse_args(["serve", *arguments]))


def test_in_a_pod_the_environment_says_it_all(files: list[str]) -> None:
    found = settings(files, ENVIRONMENT)
    assert found.config.drain_seconds == 7
    assert found.token == "secret"
    assert found.identity.log_context() == {
        "namespace": "prod",
        "deployment": "mixtral",
        "group": 1,
        "member": 3,
    }
    assert found.identity.incarnation == "uid-7"
    assert found.host == "0.0.0.0"
    assert (found.http_port, found.control_port) == (8000, 8001)


def test_flags_win_over_the_environment(files: list[str]) -> None:
    found = settings([*files, "--member", "5", "--host", "127.0.0.7"], ENVIRONMENT)
    assert found.identity.member == 5
    assert found.host == "127.0.0.7"


def test_alone_on_a_machine_a_host_is_enough(files: list[str]) -> None:
    first, second = (settings([*files, "--host", "127.0.0.2"]) for _ in range(2))
    assert first.host == "127.0.0.2"
    assert first.identity.incarnation != second.identity.incarnation


def test_an_ipv6_pod_listens_on_ipv6(files: list[str]) -> None:
    assert settings([*files, "--address", "fd00::7"]).host == "::"


def test_mistakes_name_the_way_out(files: list[str], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--host is missing"):
        settings(files)
    with pytest.raises(UsageError, match="is no IP address"):
        settings([*files, "--address", "here"])
    with pytest.raises(UsageError, match=r"--config: can not read .*No such file"):
        settings([*files, "--host", "::1", "--config", f"{tmp_path}/none"])
    (tmp_path / "worker.json").write_text('{"schema": 2}')
    with pytest.raises(UsageError, match=r"--config: .*upgrade the reader"):
        settings([*files, "--host", "::1"])


def test_an_empty_token_is_refused(files: list[str], tmp_path: Path) -> None:
    (tmp_path / "token").write_text("\n")
    with pytest.raises(UsageError, match="is empty"):
        settings([*files, "--host", "::1"])


@pytest.mark.parametrize("flags", [["--threads", "0"], ["--http-port", "70000"], ["--member", "x"]])
def test_numbers_are_checked(
    files: list[str], flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        settings([*files, *flags])
    assert flags[0] in capsys.readouterr().err


def test_the_help_of_serve_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser({}).parse_args(["serve", "--help"])
    text = capsys.readouterr().out
    for part in ("8000", "8001", "SIGTERM drains", "example", names.ENV_POD_IP, "worker.json"):
        assert part in text


def test_a_taken_port_is_named() -> None:
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(AddressInUse, match=f"127.0.0.1 port {port}: Address already in use"):
            bind("127.0.0.1", port)


HEAVY = ("torch", "transformers", "tokenizers", "llguidance", "uvicorn", "starlette", "httpx")
"""Each takes a good part of a second, or several, to import."""


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"], ["serve", "--help"], ["local", "--help"], ["bench", "--help"],
        [], ["serves"], ["--serve"], ["serve", "--threads", "0"],
        ["serve", "--host", "::1", "--config", "none"],
        ["local"], ["local", "--model", "m", "--ranks", "0"],
        ["local", "--model", "m", "--kv", "fp3"],
        ["bench"], ["bench", "--rate", "-1"],
    ],
)  # fmt: skip
def test_help_and_mistakes_import_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys\n"
        "from moe_worker.main import main\n"
        "try:\n"
        f"    main({arguments!r})\n"
        "finally:\n"
        f"    print('imported:', *sorted(set({HEAVY!r}) & set(sys.modules)))\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.returncode == (0 if "--help" in arguments else 2), ended.stderr
    assert ended.stdout.splitlines()[-1].split() == ["imported:"]
