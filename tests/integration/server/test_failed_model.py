"""A model that can not be served: the worker stays, says why, and refuses requests."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from moe_api import names
from moe_api.worker import KvConfig, ModelConfig, WorkerConfig, WorkerPhase, WorkerState
from moe_worker.assemble import assemble
from moe_worker.metrics import WorkerMetrics
from moe_worker.serve import Identity, ServeSettings
from moe_worker.serving_engine import ServingEngine
from tests.support.http_worker import http_worker
from tests.support.served_model import MODEL_PATH


def assembled(model: Path, **kv: Any) -> tuple[ServingEngine, object]:
    settings = ServeSettings(
        config=WorkerConfig(
            model=ModelConfig(path=str(model), served_name="m"), kv=KvConfig.model_validate(kv)
        ),
        token="t",
        identity=Identity("ns", "d", 0, 4, "uid"),
        host="127.0.0.1",
    )
    return assemble(settings, WorkerMetrics(CollectorRegistry()))


def copy_of_the_example(folder: Path, without: str = "", **config: Any) -> Path:
    for file in MODEL_PATH.iterdir():
        if file.name not in (without, "config.json"):
            (folder / file.name).symlink_to(file)
    original = json.loads((MODEL_PATH / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**original, **config}))
    return folder


def test_the_example_waits_for_a_plan(tmp_path: Path) -> None:
    engine, model = assembled(copy_of_the_example(tmp_path))
    assert model is not None
    with http_worker(engine) as worker, worker.client() as client:
        told = client.get("/readyz").json()
        told.pop("warmUp", None)  # of kernels that this machine has not compiled yet
        assert told == {"ready": False, "reason": "Waiting"}
        assert "moe_plan_epoch 0.0" in client.get("/metrics").text


@pytest.mark.parametrize(
    ("without", "config", "reason", "message"),
    [
        ("", {"num_local_experts": None}, "ModelHasNoExperts", "no experts"),
        ("", {"hidden_size": 64}, "ModelUnreadable", "shape"),
        ("tokenizer.json", {}, "ModelUnreadable", "tokenizer.json"),
        ("model.safetensors", {}, "ModelUnreadable", "safetensors"),
    ],
)
def test_the_reason_is_reported(
    tmp_path: Path, without: str, config: dict[str, Any], reason: str, message: str
) -> None:
    engine, model = assembled(copy_of_the_example(tmp_path, without, **config))
    state = engine.state()
    assert model is None
    assert (state.phase, state.member, state.incarnation) == (WorkerPhase.FAILED, 4, "uid")
    assert state.error_reason == reason
    assert message in (state.last_error or "")


@pytest.mark.parametrize(
    ("kv", "message"),
    [
        ({"scalesFile": "none.json"}, "cannot read .*none.json"),
        ({"keyScaling": "Center"}, "needs kvCache.scalesFile"),
        ({"dtype": "fp8", "encoding": "FourOverSix"}, "use dtype nvfp4"),
    ],
)
def test_options_of_the_cache_that_can_not_be_kept_are_reported(
    tmp_path: Path, kv: dict[str, Any], message: str
) -> None:
    engine, model = assembled(copy_of_the_example(tmp_path), **kv)
    state = engine.state()
    assert model is None
    assert (state.phase, state.error_reason) == (WorkerPhase.FAILED, "KvCacheUnusable")
    assert re.search(message, state.last_error or "")


def test_both_listeners_answer_without_a_model(tmp_path: Path) -> None:
    engine, _ = assembled(tmp_path)
    with http_worker(engine) as worker, worker.client() as client, worker.control() as control:
        state = WorkerState.from_json(control.get(names.CONTROL_STATE).content)
        assert state.error_reason == "ModelUnreadable"
        assert control.get(names.CONTROL_LOAD).status_code == 200
        assert client.get("/healthz").status_code == 200
        assert client.get("/readyz").json() == {"ready": False, "reason": "Failed"}
        assert client.post("/v1/completions", json={}).status_code == 503
        assert "moe_requests_running 0.0" in client.get("/metrics").text
