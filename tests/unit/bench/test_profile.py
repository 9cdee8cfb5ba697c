"""A profile adds up: calls count once and for the right part, and the parts make up the step."""

from __future__ import annotations

import itertools
import json
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console

from moe_kernels import implementation
from moe_kernels.implementation import Call
from moe_kernels.linear import linear
from moe_kernels.norm_rope import rms_norm
from moe_worker import bench
from moe_worker.bench import profile
from moe_worker.bench.parts import PARTS, Calls, Watch, mean_of, part_of, parts_by_weights
from moe_worker.bench.profile import PHASES, Profile
from moe_worker.bench.profile_table import render
from moe_worker.main import build_parser
from moe_worker.model.config import load_architecture
from moe_worker.model.weights import Checkpoint
from tests.support.random_checkpoint import write_random_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_checkpoint(tmp_path_factory.mktemp("model"))


def call(operation: str, run: object = None, compose: object = None) -> Call:
    nothing = lambda: None  # noqa: E731
    return Call(operation, operation, (), run or nothing, compose or nothing)  # type: ignore[arg-type]


def ticking() -> Watch:
    """Every look at the clock is a second later; names are operations."""
    seconds = itertools.count()
    return Watch(lambda of: of.operation, frozenset({"whole"}), lambda: float(next(seconds)))


def test_an_inner_call_is_part_of_the_outer_one() -> None:
    watch = ticking()
    watch(call("outer", run=lambda: watch(call("inner"))))
    watch(call("outer"))
    calls = watch.take()
    assert calls.seconds == {"outer": 2.0}
    assert calls.counts == {"outer": 2}
    assert not watch.take().counts


def test_a_composed_operation_counts_as_what_it_is_made_of() -> None:
    watch = ticking()
    watch(call("whole", run=pytest.fail, compose=lambda: [watch(call("a")), watch(call("b"))]))
    assert watch.take().counts == {"a": 1, "b": 1}


def test_a_call_that_fails_does_not_hide_the_next() -> None:
    watch = ticking()

    def fail() -> None:
        raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011
        watch(call("a", run=fail))
    watch(call("b"))
    assert watch.take().counts == {"a": 1, "b": 1}


def test_means_are_of_a_step() -> None:
    watch = ticking()
    watch(call("a"))
    first = watch.take()
    for _ in range(3):
        watch(call("a"))
    mean = mean_of([first, watch.take()])
    assert (mean.seconds["a"], mean.counts["a"]) == (2.0, 2)


def test_weights_tell_what_a_product_is_for(model: Path) -> None:
    shared = Checkpoint(model, load_architecture(model)).load_shared()
    layer = shared.layers[1]
    assert layer.router is not None
    by_weights = parts_by_weights(shared)
    seen = []

    def watcher(of: Call) -> object:
        seen.append(part_of(of, by_weights))
        return of.run()

    x = torch.zeros(1, 32)
    with implementation.watched(watcher):
        rms_norm(x, layer.attention_norm_H, 1e-6)
        linear(x, layer.attention["qkv"])
        linear(x, layer.attention["o"])
        rms_norm(x, layer.mlp_norm_H, 1e-6)
        linear(x, layer.router.gate_EH)
        linear(x, shared.lm_head_VH)
        rms_norm(x, torch.ones(32), 1e-6)
    assert seen == ["qkv", "qkv", "o", "route", "route", "head", "prep"]
    linear(x, shared.lm_head_VH)
    assert len(seen) == 7, "watched no more"


def test_the_command_profiles_the_whole_engine(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile, "BATCHES", (1, 2))
    monkeypatch.setattr(profile, "STEPS", 4)
    monkeypatch.setattr(profile, "PREFILLS", 3)
    monkeypatch.setattr(profile, "PREFILL_TOKENS", 40)
    path = tmp_path / "profile.json"
    before = implementation.chosen()
    parsed = build_parser({}).parse_args(
        ["bench", "--profile", "--model", str(model), "--json", str(path), "--threads", "1",
         "--kernels", "reference"]
    )  # fmt: skip
    assert bench.run(parsed) == 0
    assert implementation.chosen() == before
    found = json.loads(path.read_text())
    assert found["setting"]["kernels"] == "reference"
    assert [of["name"] for of in found["profiles"]] == ["B = 1", "B = 2", "prefill 40"]
    for of in found["profiles"]:
        parts = of["in_parts"]["seconds"]
        assert {"qkv", "prep", "attend", "o", "route", "experts", "head"} <= set(parts)
        assert all(seconds > 0 for seconds in parts.values())
        assert sum(parts.values()) < of["in_parts_seconds"]
        assert sum(of["phases"].values()) <= of["step_seconds"]


def test_a_profile_wants_a_model_and_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    for flags, message in (
        (["--profile"], "needs --model"),
        (["--profile", "--model", "x", "--url", "http://127.0.0.2:8000"], "leave --url out"),
        (["--profile", "--model", "no-such-folder"], "--model no-such-folder"),
        ([], "--url is missing"),
    ):
        assert bench.run(build_parser({}).parse_args(["bench", *flags])) == 2
        assert message in capsys.readouterr().err


def test_the_tables_fit_a_narrow_screen() -> None:
    calls = Calls(dict.fromkeys(PARTS, 0.1234), dict.fromkeys(PARTS, 1000))
    long = Profile(
        "prefill 512",
        512,
        12.34,
        dict.fromkeys(PHASES, 1.234),
        calls,
        calls,
        in_parts_seconds=1.234,
    )
    console = Console(width=80, record=True, file=StringIO())
    console.print(render([long], "model: kernels cpu, 2 threads, KV nvfp4"))
    text = console.export_text()
    assert "…" not in text
    assert all(heading in text for heading in (*PARTS, *PHASES, "rest", "all", "real", "between"))
