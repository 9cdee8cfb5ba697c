"""What carries bytes between ranks, as the worker's file says it."""

from __future__ import annotations

import json

import pytest

from moe_api.document import DocumentError
from moe_api.worker import WorkerConfig


def config(**fields: str) -> WorkerConfig:
    model = {"path": "/m", "servedName": "m"}
    return WorkerConfig.from_json(json.dumps({"model": model, **fields}))


@pytest.mark.parametrize(
    ("fields", "carrier"),
    [
        ({}, "tcp"),
        ({"transport": "tcp"}, "tcp"),
        ({"transport": "gloo"}, "gloo"),
        ({"device": "cuda"}, "nccl"),
        ({"device": "cuda", "transport": "nccl"}, "nccl"),
    ],
)
def test_the_device_chooses_unless_the_file_does(fields: dict[str, str], carrier: str) -> None:
    assert config(**fields).carrier == carrier


@pytest.mark.parametrize(
    ("device", "transport", "way_out"),
    [("cpu", "nccl", "auto or tcp or gloo"), ("cuda", "tcp", "auto or nccl"),
     ("cuda", "gloo", "auto or nccl")],
)  # fmt: skip
def test_a_transport_that_the_device_lacks_is_refused(
    device: str, transport: str, way_out: str
) -> None:
    with pytest.raises(DocumentError, match=f"{transport} .*{device}.* {way_out}"):
        config(device=device, transport=transport)
