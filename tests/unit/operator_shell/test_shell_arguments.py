"""The command line teaches, and every mistake names its option and the way out."""

from __future__ import annotations

import pathlib

import pytest

from moe_operator import arguments
from moe_operator.errors import SetupError
from moe_operator.settings import Settings


def settings(*options: str) -> Settings:
    return arguments.settings_from(arguments.parse(["run", *options]))


def test_without_options_the_defaults_are_the_settings_own() -> None:
    made, plain = settings(), Settings()
    assert made.namespaces == ()
    assert made.probe_port == plain.probe_port
    assert made.client == plain.client
    assert made.lease.namespace == "default"  # outside a cluster


def test_namespaces_repeat_and_are_kept_once() -> None:
    made = settings("--namespace", "a", "--namespace", "b", "--namespace", "a")
    assert made.namespaces == ("a", "b")


def test_worker_defaults_come_from_a_file_and_the_image_from_the_command_line(
    tmp_path: pathlib.Path,
) -> None:
    file = tmp_path / "defaults.yaml"
    file.write_text(
        "image: other\nimagePullSecrets: [registry]\npodTemplate: {spec: {priorityClassName: x}}\n"
    )
    made = settings("--worker-defaults", str(file), "--worker-image", "worker:1").worker
    assert made.image == "worker:1"
    assert made.image_pull_secrets == ("registry",)
    assert made.pod_template == {"spec": {"priorityClassName": "x"}}
    assert settings("--worker-defaults", str(file)).worker.image == "other"


@pytest.mark.parametrize(
    ("content", "told"),
    [("imag: x", "unknown imag; known: image"), ("- a", "no mapping"), ("a: [", "cannot be read")],
)
def test_a_wrong_file_is_refused_by_name(content: str, told: str, tmp_path: pathlib.Path) -> None:
    file = tmp_path / "defaults.yaml"
    file.write_text(content)
    with pytest.raises(SetupError, match=told) as caught:
        settings("--worker-defaults", str(file))
    assert str(file) in str(caught.value)


def test_a_lease_that_would_let_two_lead_is_refused() -> None:
    with pytest.raises(SetupError, match="must exceed the renew deadline"):
        settings("--lease-duration", "10", "--lease-renew-deadline", "10")


def test_rates_must_be_positive() -> None:
    with pytest.raises(SetupError, match="--kube-qps must be more than 0"):
        settings("--kube-qps", "0")


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        arguments.parse(["run", "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for word in ("examples:", "--worker-image", "/healthz", "no", "finalizer", "(default: 8080)"):
        assert word in text


def test_identities_differ_within_one_machine() -> None:
    assert arguments.identity() != arguments.identity()
