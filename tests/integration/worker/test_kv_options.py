"""An engine with KV options: they are in use and told, or refused before anything is allocated."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from moe_api.plan import GroupPlan, Member, encode_layers
from moe_api.worker import KvConfig, ModelConfig, SchedulerConfig, WorkerConfig, WorkerPhase
from moe_kernels.kv_formats import KvFormatError
from moe_placement.initial import contiguous
from moe_worker.engine.engine import Engine
from moe_worker.engine.events import Event, Finished
from moe_worker.engine.kv_scales import KvScalesUnusable
from moe_worker.engine.sampling_params import SamplingParams
from moe_worker.engine.settings import EngineSettings
from moe_worker.metrics import EngineCollector
from moe_worker.model.config import load_architecture
from moe_worker.model.weights import Checkpoint
from tests.support.random_checkpoint import write_random_checkpoint
from tests.support.worker_processes import wait_until

LAYERS, EXPERTS, HEAD_DIM = 2, 8, 32
Make = Callable[..., Engine]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "m"
    write_random_checkpoint(path, seed=5, head_dim=HEAD_DIM)
    row = [[0.5] * HEAD_DIM]
    layers = [
        {"layer": layer, "scales": {"key": 0.05}, "keyCenter": row} for layer in range(LAYERS)
    ]
    (path / "scales.json").write_text(json.dumps({"schema": 1, "layers": layers}))
    (path / "short.json").write_text(json.dumps({"schema": 1, "layers": layers[:1]}))
    return path


@pytest.fixture
def make(model: Path) -> Iterator[Make]:
    engines = []

    def start(memory_bytes: int = 2 << 30, **kv: Any) -> Engine:
        config = WorkerConfig(
            model=ModelConfig(path=str(model), served_name="m"),
            kv=KvConfig.model_validate({"blocks": 32, **kv}),
            scheduler=SchedulerConfig(max_running=4, max_batched_tokens=32, max_queued=8),
        )
        arch = load_architecture(model)
        settings = EngineSettings(config, 0, "inc", "token", memory_bytes=memory_bytes)
        engine = Engine(settings, arch, Checkpoint(model, arch))
        engine.start()
        engines.append(engine)
        member = Member(id=0, pod="p", uid="u", address="127.0.0.1", incarnation="inc")
        slots = encode_layers(contiguous(LAYERS, EXPERTS, 1, EXPERTS + 1))
        engine.put_plan(
            GroupPlan(
                namespace="n", deployment="d", group=0, leader_epoch=1, generation=1, epoch=1,
                members=[member], layers=slots,
            )
        )  # fmt: skip
        return engine

    yield start
    for engine in engines:
        engine.stop()


def generate(engine: Engine, name: str, num_tokens: int) -> None:
    events: Queue[Event] = Queue()
    engine.submit(name, list(range(1, 40)), SamplingParams(max_tokens=num_tokens), events.put)
    while not isinstance(events.get(timeout=60), Finished):
        pass


@pytest.mark.parametrize("dtype", ["fp8", "k8v4", "nvfp4"])
def test_d10_scales_of_the_file_are_told_as_in_use(make: Make, dtype: str) -> None:
    engine = make(dtype=dtype, scalesFile="scales.json", keyScaling="Center")
    wait_until(lambda: engine.admitting, "the engine admits requests")
    kv = engine.state().kv
    assert kv is not None
    assert kv.format == dtype
    assert kv.scales["key"] == [0.05] * LAYERS
    assert kv.scales["value"] == [2.0**-3 if dtype == "fp8" else 2.0**-6] * LAYERS
    assert engine.loader.loaded is not None
    assert all(p.key_center_ND is not None for p in engine.loader.loaded.runner.kv.layers)


@pytest.mark.parametrize("dtype", ["auto", "fp8", "k8v4", "nvfp4", "mxfp4"])
def test_bytes_and_errors_of_the_format_are_told(make: Make, dtype: str) -> None:
    engine = make(dtype=dtype)
    wait_until(lambda: engine.admitting, "the engine admits requests")
    state = engine.state()
    per_vector = {"auto": 128, "fp8": 32, "k8v4": 25, "nvfp4": 18, "mxfp4": 17}[dtype]
    assert state.model is not None
    assert state.kv is not None
    assert state.model.kv_bytes_per_token == LAYERS * 2 * per_vector
    assert state.kv.bytes == 32 * 16 * state.model.kv_bytes_per_token
    assert state.kv.quantization_errors == [None] * LAYERS

    generate(engine, "r", 24)
    after = engine.state().kv
    assert after is not None
    errors = after.quantization_errors
    bounds = {"auto": 0.0, "fp8": 0.05, "k8v4": 0.13, "nvfp4": 0.13, "mxfp4": 0.2}
    for error in errors:
        assert error is not None
        assert bounds[dtype] / 4 <= error <= bounds[dtype]

    registry = CollectorRegistry()
    registry.register(EngineCollector(engine))
    for layer, error in enumerate(errors):
        labels = {"layer": str(layer)}
        assert registry.get_sample_value("moe_kv_quantization_error", labels) == error
    assert registry.get_sample_value("moe_kv_bytes_per_token") == LAYERS * 2 * per_vector


def test_options_that_do_not_go_with_the_model_are_refused_at_once(make: Make) -> None:
    with pytest.raises(KvScalesUnusable, match="layer 1 is missing"):
        make(scalesFile="short.json")
    with pytest.raises(KvFormatError, match=r"FourOverSix .* mxfp4 has none"):
        make(dtype="mxfp4", encoding="FourOverSix")


def test_what_does_not_fit_is_refused_before_anything_is_read(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[object] = []
    monkeypatch.setattr(Checkpoint, "load_shared", lambda self, device: reads.append(device))
    engine = make(memory_bytes=1 << 20)
    wait_until(lambda: engine.state().phase is WorkerPhase.FAILED, "it has failed")
    state = engine.state()
    assert state.error_reason == "KvDoesNotFit"
    assert "for attention over" in (state.last_error or "")
    assert reads == []
    assert state.kv is None
