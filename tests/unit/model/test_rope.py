"""Angles of rotary positions: those of `transformers` for each way to stretch them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from moe_worker.model.fields import Fields
from moe_worker.model.rope import frequencies, magnitude
from moe_worker.model.spec import ModelUnreadable, RopeSpec

HEAD_DIM, POSITIONS, THETA = 64, 4096, 5e5

STRETCHED: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512},
    {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096,
     "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 512,
     "mscale": 1.0, "mscale_all_dim": 0.7},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024,
     "attention_factor": 1.3, "beta_fast": 16},
    {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 512,
     "low_freq_factor": 1.0, "high_freq_factor": 4.0},
]  # fmt: skip


def read(rope: dict[str, Any], **config: Any) -> RopeSpec:
    values = {"rope_theta": THETA, "rope_scaling": rope, **config}
    return Fields(values).rope(HEAD_DIM, POSITIONS, theta=1e4)


def theirs(rope: dict[str, Any], length: int | None = None) -> tuple[torch.Tensor, float]:
    config = PretrainedConfig(
        head_dim=HEAD_DIM, hidden_size=4 * HEAD_DIM, num_attention_heads=4,
        max_position_embeddings=POSITIONS, rope_parameters={"rope_theta": THETA, **rope},
    )  # fmt: skip
    found: tuple[torch.Tensor, float] = ROPE_INIT_FUNCTIONS[rope["rope_type"]](
        config, torch.device("cpu"), seq_len=length
    )
    return found


@pytest.mark.parametrize("rope", STRETCHED, ids=lambda rope: "-".join(map(str, rope.values())))
def test_each_kind_turns_as_transformers_turns(rope: dict[str, Any]) -> None:
    expected, factor = theirs(rope)
    spec = read(rope)
    assert torch.equal(frequencies(spec), expected)
    assert magnitude(spec) == pytest.approx(factor, rel=1e-12)


def test_dynamic_is_plain_up_to_its_positions_and_stretches_after() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0}
    plain = frequencies(RopeSpec(HEAD_DIM, THETA))
    assert torch.equal(frequencies(read(rope), length=POSITIONS), plain)
    longer = frequencies(read(rope), length=3 * POSITIONS)
    assert not torch.allclose(longer, plain)
    assert torch.equal(longer, theirs(rope, 3 * POSITIONS)[0])


def test_the_default_is_a_power_of_theta() -> None:
    found = frequencies(RopeSpec(dim=8, theta=100.0))
    expected = 100.0 ** (-torch.arange(0, 8, 2).double() / 8)
    torch.testing.assert_close(found.double(), expected)


def test_both_spellings_of_the_hub_are_the_same() -> None:
    old = read({"type": "linear", "factor": 4.0})
    new = Fields(
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": THETA}}
    ).rope(HEAD_DIM, POSITIONS, theta=1e4)
    assert old == new


def test_yarn_without_a_factor_stretches_to_the_positions() -> None:
    rope = {"rope_type": "yarn", "original_max_position_embeddings": 512}
    assert read(rope).factor == POSITIONS / 512


def test_only_a_part_of_a_head_may_be_rotated() -> None:
    assert read({"rope_type": "default"}, partial_rotary_factor=0.25).dim == HEAD_DIM // 4


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "longrope"}, "rope type 'longrope' is not supported"),
        ({"rope_type": "linear"}, "factor must be a positive number, got None"),
        ({"rope_type": "linear", "factor": -1}, "factor must be a positive number, got -1"),
        ({"rope_type": "llama3", "factor": 8}, "low_freq_factor must be a positive number"),
        ({"rope_type": "yarn", "truncate": "no"}, "truncate must be true or false"),
        ({"rope_type": "yarn", "mscale": "1"}, "mscale must be a positive number, got '1'"),
        ({"rope_type": "yarn", "rope_theta": 1.0}, "rope_theta 1: yarn needs more than 1"),
        ({"rope_type": "linear", "factor": math.inf}, "factor must be a positive number"),
        (
            {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4},
            "low_freq_factor 4 is not below high_freq_factor 4",
        ),
    ],
)
def test_what_cannot_be_read_is_named(rope: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelUnreadable, match=message):
        read(rope)
