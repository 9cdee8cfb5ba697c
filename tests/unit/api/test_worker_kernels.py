"""Whose operations compute, as the worker's file says it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from moe_api.document import DocumentError
from moe_api.worker import WorkerConfig


def config(**fields: Any) -> WorkerConfig:
    model = {"path": "/m", "servedName": "m"}
    return WorkerConfig.from_json(json.dumps({"model": model, **fields}))


def test_a_file_that_says_nothing_leaves_it_to_the_device_and_keeps_answers_the_same() -> None:
    assert (config().kernels, config().batch_invariant) == ("auto", True)


@pytest.mark.parametrize(
    ("device", "kernels", "way_out"),
    [("cpu", "gpu", "auto or cpu or reference"), ("cuda", "cpu", "auto or gpu or reference")],
)
def test_kernels_that_the_device_cannot_run_are_refused(
    device: str, kernels: str, way_out: str
) -> None:
    with pytest.raises(DocumentError, match=f"{kernels} .*{device}.* {way_out}"):
        config(device=device, kernels=kernels)
