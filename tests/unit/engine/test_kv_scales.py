"""The scales file: what is in it is used, what is not in it is missed by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_api.worker import KvConfig
from moe_kernels.kv_pages import append
from moe_kernels.router import RouterSpec
from moe_worker.engine.kv import STEPS_PER_SAMPLE, KvCache
from moe_worker.engine.kv_scales import KvScalesUnusable, layer_scales
from moe_worker.model.spec import AttentionSpec, ExpertSpec, LatentSpec, ModelSpec, RopeSpec

LAYERS, HEADS, DIM = 2, 2, 32
MODEL = ModelSpec(
    family="mixtral",
    num_layers=LAYERS,
    moe_layers=(0, 1),
    hidden=64,
    vocab_size=128,
    max_positions=256,
    rms_eps=1e-5,
    tie_embeddings=False,
    dtype="bfloat16",
    eos_token_ids=frozenset(),
    attention=AttentionSpec(num_heads=4, num_kv_heads=HEADS, head_dim=DIM),
    rope=RopeSpec(dim=DIM, theta=1e4),
    router=RouterSpec(num_experts=4, top_k=2),
    expert=ExpertSpec(intermediate=32),
)
LATENT = replace(
    MODEL,
    attention=LatentSpec(
        num_heads=4,
        query_rank=None,
        latent_dim=64,
        nope_dim=16,
        rope_dim=32,
        value_dim=16,
        scale=0.1,
    ),
)
MATRIX = [[1.5] * DIM] * HEADS


def write(folder: Path, *layers: dict[str, Any]) -> None:
    (folder / "scales.json").write_text(json.dumps({"schema": 1, "layers": layers}))


def config(**kv: Any) -> KvConfig:
    return KvConfig(**{"scales_file": "scales.json", **kv})


def test_d10_scales_of_a_file_are_in_use_and_change_pages(tmp_path: Path) -> None:
    k, v = torch.randn(2, 20, HEADS, DIM, generator=torch.Generator().manual_seed(0))
    caches = {}
    for key in (0.05, 1.0):
        write(
            tmp_path,
            {"layer": 1, "scales": {"key": key, "value": 0.25}},
            {"layer": 0, "scales": {"key": key, "value": 0.125}},
        )
        scales = layer_scales(tmp_path, MODEL, config())
        caches[key] = KvCache.allocate(MODEL, config(), 4, scales=scales)
        assert caches[key].scales == {"key": [key, key], "value": [0.125, 0.25]}
        append(caches[key].layers[0], k, v, torch.arange(20))
    one, other = (cache.layers[0].tensors for cache in caches.values())
    assert not all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_without_a_file_the_fixed_scales_are_in_use(tmp_path: Path) -> None:
    scales = layer_scales(tmp_path, MODEL, KvConfig())
    cache = KvCache.allocate(MODEL, KvConfig(), 4, scales=scales)
    assert cache.scales == {"key": [2.0**-4] * 2, "value": [2.0**-6] * 2}
    assert KvCache.allocate(MODEL, KvConfig(dtype="bf16"), 4).scales == {}


def test_d10_a_layer_that_is_missing_is_named(tmp_path: Path) -> None:
    write(tmp_path, {"layer": 0, "scales": {"key": 0.05}})
    with pytest.raises(KvScalesUnusable, match="layer 1 is missing; give all of the 2 layers"):
        layer_scales(tmp_path, MODEL, config())


@pytest.mark.parametrize(("scaling", "key"), [("Center", "keyCenter"), ("Channel", "keyChannel")])
def test_channels_of_keys_are_taken_where_key_scaling_asks_for_them(
    tmp_path: Path, scaling: Any, key: str
) -> None:
    layers = [{"layer": n, "keyCenter": MATRIX, "keyChannel": MATRIX} for n in range(LAYERS)]
    write(tmp_path, *layers)
    of_layers = layer_scales(tmp_path, MODEL, config(key_scaling=scaling))
    for scales in of_layers:
        given, other = scales.key_center_ND, scales.key_channel_ND
        if scaling == "Channel":
            given, other = other, given
        assert other is None
        assert given is not None
        assert given.tolist() == MATRIX
    cache = KvCache.allocate(MODEL, config(), 4, scales=of_layers)
    assert (cache.layers[1].key_center_ND is None) == (scaling == "Channel")
    write(tmp_path, layers[0], {name: part for name, part in layers[1].items() if name != key})
    with pytest.raises(KvScalesUnusable, match=f"layer 1 has no {key}, .* {scaling} needs"):
        layer_scales(tmp_path, MODEL, config(key_scaling=scaling))


def both(**entry: Any) -> list[dict[str, Any]]:
    return [{"layer": layer, **entry} for layer in range(LAYERS)]


REFUSED: list[tuple[list[dict[str, Any]], dict[str, Any], str]] = [
    (both(scales={"key": 0.0}), {}, "greater than or equal"),
    (both(scales={"keys": 1.0}), {}, "scales.keys"),
    (both(scales={"key": 1.0}, extra=1), {}, "extra"),
    (both(scales={"rope": 1.0}), {}, "layer 0 has a scale of rope, .* has scales of: key, value"),
    (
        both(scales={"key": 1.0}, keyCenter=MATRIX),
        {"dtype": "mxfp4", "key_scaling": "Center"},
        "scale of key, which would have no effect; dtype mxfp4 has scales of: none",
    ),
    (both(), {}, "has no scales, and keyScaling None uses nothing else"),
    (
        [{"layer": 0, "scales": {"key": 1.0}}, {"layer": 1, "scales": {"value": 1.0}}],
        {},
        "layer 1 has no scale of key, layer 0 has one",
    ),
    ([*both(scales={"key": 1.0}), {"layer": 1}], {}, "has layer 1 twice"),
    ([*both(scales={"key": 1.0}), {"layer": 2}], {}, "has layer 2, the model's are 0 to 1"),
    (both(keyCenter=[[1.0] * 3] * 2), {"key_scaling": "Center"}, "not 2 kv heads of 32 numbers"),
    (both(keyCenter=MATRIX[:1]), {"key_scaling": "Center"}, "keyCenter of layer 0 is not 2 kv"),
    (both(keyChannel=[[0.0] * DIM] * 2), {"key_scaling": "Channel"}, "greater than or equal"),
    (both(), {"scales_file": "other.json"}, "cannot read .*other.json: No such file"),
    (both(), {"scales_file": "../scales.json"}, "below the model's folder"),
    (both(), {"scales_file": "/scales.json"}, "below the model's folder"),
    (both(), {"key_scaling": "Center", "scales_file": None}, "Center needs kvCache.scalesFile"),
    (both(), {"key_scaling": "Center", "dtype": "auto"}, "dtype auto does not quantise"),
]


@pytest.mark.parametrize(("layers", "kv", "message"), REFUSED)
def test_what_would_be_guessed_or_ignored_is_refused(
    tmp_path: Path, layers: list[dict[str, Any]], kv: dict[str, Any], message: str
) -> None:
    write(tmp_path, *layers)
    with pytest.raises(KvScalesUnusable, match=message):
        layer_scales(tmp_path, MODEL, config(**kv))


def test_numbers_that_are_none_are_refused(tmp_path: Path) -> None:
    (tmp_path / "scales.json").write_text(
        '{"schema": 1, "layers": [{"layer": 0, "scales": {"key": NaN}}]}'
    )
    with pytest.raises(KvScalesUnusable, match=r"scales\.json: KvScalesFile"):
        layer_scales(tmp_path, MODEL, config())


def test_latents_have_scales_of_their_own_and_no_key_scaling(tmp_path: Path) -> None:
    write(tmp_path, *both(scales={"latent": 0.5, "rope": 0.25}))
    scales = layer_scales(tmp_path, LATENT, config())
    cache = KvCache.allocate(LATENT, config(), 4, scales=scales)
    assert cache.scales == {"latent": [0.5, 0.5], "rope": [0.25, 0.25]}
    with pytest.raises(KvScalesUnusable, match="latent attention stores one latent"):
        layer_scales(tmp_path, LATENT, config(key_scaling="Center"))


def test_each_layer_is_sampled_in_turn(tmp_path: Path) -> None:
    cache = KvCache.allocate(MODEL, KvConfig(), 4)
    k, v = torch.randn(2, 3, HEADS, DIM, generator=torch.Generator().manual_seed(0))
    known = []
    for step in range(2 * STEPS_PER_SAMPLE):
        cache.begin_step()
        for pages in cache.layers:
            append(pages, k, v, torch.arange(3) + step)
        known.append([error is not None for error in cache.quantization_errors])
    assert known[0] == [True, False]
    assert known[STEPS_PER_SAMPLE] == [True, True]
    errors = cache.quantization_errors
    assert errors[0] == errors[1] == pytest.approx(0.095, abs=0.02)
