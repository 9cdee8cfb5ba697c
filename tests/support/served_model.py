"""The example model behind a real `moe-worker serve` process that is a group of one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moe_api import names
from moe_api.plan import GroupPlan, Member, encode_layers
from moe_api.worker import WorkerState
from moe_placement.initial import contiguous
from tests.support.until import until
from tests.support.worker_command import ROOT, WorkerCommand, worker_command
from tests.support.worker_processes import free_network

MODEL_PATH = ROOT / "examples" / "tiny-moe"
MODEL_NAME = "tiny-moe"
TOKEN = "control-secret"


@contextmanager
def serving_worker(folder: Path, **config: Any) -> Iterator[WorkerCommand]:
    """A worker whose plan names it alone; `config` overrides parts of its WorkerConfig."""
    host = f"{free_network()}.2"
    command = serve_command(folder, host, **config)
    with worker_command(command, host, folder / "worker.log") as worker:
        with worker.control(TOKEN) as control:
            plan = plan_of_one(worker, state_of(worker))
            answer = control.put(names.CONTROL_PLAN, content=plan.to_json())
            assert answer.status_code == 202, answer.text
        until(lambda: worker.answers("/readyz"), f"it serves; {worker.log()}", 600)
        yield worker


def serve_command(folder: Path, host: str, **config: Any) -> list[str]:
    """Module and flags of a worker that listens on `host`; writes the files they name."""
    model = {"path": str(MODEL_PATH), "servedName": MODEL_NAME}
    (folder / "worker.json").write_text(json.dumps({"schema": 1, "model": model, **config}))
    (folder / "token").write_text(TOKEN)
    flags = ["--config", f"{folder}/worker.json", "--control-token-file", f"{folder}/token"]
    return ["moe_worker.main", "serve", *flags, "--host", host, "--deployment", "tiny"]


def state_of(worker: WorkerCommand) -> WorkerState:
    with worker.control(TOKEN) as control:
        return WorkerState.from_json(control.get(names.CONTROL_STATE).content)


def plan_of_one(worker: WorkerCommand, state: WorkerState) -> GroupPlan:
    """All experts of the model on this worker, and one free slot."""
    assert state.model is not None
    slots = contiguous(state.model.layers, state.model.experts, 1, state.model.experts + 1)
    member = Member(
        id=state.member, pod="", uid="", address=worker.host, incarnation=state.incarnation
    )
    return GroupPlan(
        namespace="default",
        deployment="tiny",
        group=0,
        leader_epoch=1,
        generation=1,
        epoch=1,
        members=[member],
        layers=encode_layers(slots),
    ).sealed()
