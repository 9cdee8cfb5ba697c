"""gpt-oss against `transformers`, from floats and from MXFP4: sinks, windows, biases, clamps."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GptOssConfig

from moe_api.worker import KvConfig
from moe_kernels.activation import SwigluOai
from moe_kernels.kv_pages import LayerScales
from moe_worker.engine.kv import KvCache
from moe_worker.engine.runner import Runner
from moe_worker.engine.sampling_params import SamplingParams
from moe_worker.engine.sequence import Sequence as Generation
from moe_worker.model.config import ModelUnreadable, load_architecture, parse_architecture
from moe_worker.model.mxfp4 import Mxfp4
from moe_worker.model.spec import ModelSpec
from moe_worker.model.weights import Checkpoint
from tests.support.family_models import assert_parity, expected_logits, prompts, reference
from tests.support.gpt_oss_models import WINDOW, save_gpt_oss, save_mxfp4_twins
from tests.support.one_rank import OneRank, Trace, run_all

BFLOAT16_ERROR = 0.2
"""Of a logit, in standard deviations of the logits. Measured: .09 for floats, .14 for MXFP4, while
transformers in bfloat16 is off by .19 and .24."""
pytestmark = pytest.mark.usefixtures("implementation")
EXPERTS = "model.layers.1.mlp.experts"
# As published for the model of 20 billion parameters.
HUB_CONFIG: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "pad_token_id": 199999,
    "quantization_config": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "transformers_version": "4.55.0.dev0",
    "use_cache": True,
    "vocab_size": 201088,
}


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_gpt_oss(tmp_path_factory.mktemp("floats"))


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(MXFP4, the same as floats), both with everything else in float32."""
    root = tmp_path_factory.mktemp("twins")
    save_mxfp4_twins(root / "packed", root / "floats")
    return root / "packed", root / "floats"


@pytest.fixture(scope="module")
def packed_rank(twins: tuple[Path, Path]) -> OneRank:
    return OneRank.load(twins[0])


def changed(**changes: Any) -> ModelSpec:
    config = {**HUB_CONFIG, **changes}
    return parse_architecture({key: value for key, value in config.items() if value is not ...})


def test_the_published_config_is_read() -> None:
    spec = changed()
    attention = spec.grouped_query
    assert spec.dtype == "bfloat16", "the file names none"
    assert attention.windows == (128, None) * 12
    assert attention.sinks
    assert attention.qkv_bias
    assert attention.output_bias
    assert (spec.rope.kind, spec.rope.factor, spec.rope.truncate) == ("yarn", 32.0, False)
    assert (spec.rope.dim, spec.rope.theta, spec.rope.original_positions) == (64, 150000.0, 4096)
    assert (spec.router.score, spec.router.logit_bias, spec.top_k) == ("softmax_topk", True, 4)
    assert spec.expert.act == SwigluOai(7.0, 1.702)
    assert spec.expert.bias
    assert spec.encoding == Mxfp4()
    assert spec.bytes_per_expert == 2 * (3 * 2880 * 2880 + 3 * 2880)


def test_what_a_config_leaves_out_is_as_in_transformers(tmp_path: Path) -> None:
    own = {"num_hidden_layers": 4, "num_local_experts": 8}
    absent = {
        key: ...
        for key in (
            *("rope_scaling", "rope_theta", "layer_types", "sliding_window", "swiglu_limit"),
            *("attention_bias", "num_experts_per_tok", "head_dim", "quantization_config"),
        )
    }
    theirs = GptOssConfig(
        architectures=["GptOssForCausalLM"],
        hidden_size=2880,
        dtype="bfloat16",
        eos_token_id=200002,
        **own,
    )
    theirs.save_pretrained(tmp_path)
    assert load_architecture(tmp_path) == changed(**own, **absent)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization_config": {"quant_method": "awq"}}, "'awq' is not supported for GptOss"),
        ({"layer_types": ["chunked_attention"] * 24}, "layer_types must be 24 of sliding"),
        ({"sliding_window": 0}, "sliding_window must be a positive integer"),
        ({"swiglu_limit": -1.0}, "swiglu_limit must be a positive number"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"num_experts_per_tok": 33}, "num_experts_per_tok is 33: must be 1 to the 32"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelUnreadable, match=message):
        changed(**changes)


def test_logits_and_text_are_theirs(floats: Path) -> None:
    """With prompts shorter and longer than the window; every text grows beyond it."""
    asked = prompts(1)
    assert min(map(len, asked)) < WINDOW < max(map(len, asked))
    assert_parity(floats, asked)


VARIANTS: list[dict[str, Any]] = [
    {"attention_bias": False, "num_experts_per_tok": 1},
    {
        "layer_types": ["full_attention", *["sliding_attention"] * 3],
        "sliding_window": 1,
        "swiglu_alpha": 1.0,
        "num_experts_per_tok": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
]


@pytest.mark.parametrize("changes", VARIANTS, ids=["plain", "odd"])
def test_options_are_theirs(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert_parity(save_gpt_oss(tmp_path, seed=5, **changes), prompts(2, lengths=(60, 9)))


def test_four_bit_experts_give_the_logits_of_their_floats(
    twins: tuple[Path, Path], packed_rank: OneRank
) -> None:
    asked = prompts(1)
    traces = packed_rank.generate(asked, max_tokens=48, kv_dtype="fp32", max_batched_tokens=48)
    assert_bit_equal(traces, assert_parity(twins[1], asked))


def test_four_bit_experts_are_theirs_number_by_number(twins: tuple[Path, Path]) -> None:
    packed, floats = (Checkpoint(path, load_architecture(path)) for path in twins)
    for expert in range(8):
        ours, theirs = packed.read_expert(2, expert), floats.read_expert(2, expert)
        assert torch.equal(ours.w13_2IH, theirs.w13_2IH)
        assert torch.equal(ours.w2_HI, theirs.w2_HI)


def test_an_expert_is_gates_over_ups_and_its_biases(floats: Path) -> None:
    content = load_file(floats / "model.safetensors")
    expert = Checkpoint(floats, load_architecture(floats)).read_expert(1, 5)
    both, bias = content[f"{EXPERTS}.gate_up_proj"][5], content[f"{EXPERTS}.gate_up_proj_bias"][5]
    assert torch.equal(expert.w13_2IH[:96], both[:, 0::2].T)
    assert torch.equal(expert.w13_2IH[96:], both[:, 1::2].T)
    assert expert.b13_2I is not None
    assert torch.equal(expert.b13_2I, torch.cat((bias[0::2], bias[1::2])))
    assert torch.equal(expert.w2_HI, content[f"{EXPERTS}.down_proj"][5].T)


@pytest.mark.parametrize("packed", [False, True], ids=["floats", "mxfp4"])
def test_bfloat16_stays_close(tmp_path: Path, packed: bool) -> None:
    """Their float32 of the same bfloat16 weights is the truth; ours rounds inputs of products.

    Rounding sends a few tokens, whose gates are near a tie, to another expert: five of 32 may.
    """
    if packed:
        save_mxfp4_twins(tmp_path / "packed", tmp_path / "floats", dtype=torch.bfloat16)
        ours, theirs = tmp_path / "packed", tmp_path / "floats"
    else:
        ours = theirs = save_gpt_oss(tmp_path, dtype=torch.bfloat16)
    asked = prompts(1, lengths=(40,))
    (trace,) = OneRank.load(ours).generate(asked, max_tokens=32, kv_dtype="bf16")
    expected = expected_logits(reference(theirs), asked[0], trace)
    error_T = (torch.stack(trace.logits) - expected).abs().amax(dim=1) / expected.std()
    assert float(error_T.median()) < BFLOAT16_ERROR / 3
    assert float(error_T.sort().values[-6]) < BFLOAT16_ERROR


def assert_bit_equal(traces: Sequence[Trace], expected: Sequence[Trace]) -> None:
    for trace, other in zip(traces, expected, strict=True):
        assert trace.tokens == other.tokens
        assert torch.equal(torch.stack(trace.logits), torch.stack(other.logits))


@pytest.mark.parametrize("kv_dtype", ["fp32", "nvfp4"])
def test_chunks_of_a_prompt_change_no_bit(packed_rank: OneRank, kv_dtype: str) -> None:
    """The longer prompt has keys before the window of its first block's queries."""
    asked = prompts(7, lengths=(5, 40))
    whole = packed_rank.generate(asked, max_tokens=3, kv_dtype=kv_dtype)
    for chunk in (1, 3, 16):
        traces = packed_rank.generate(
            asked, max_tokens=3, kv_dtype=kv_dtype, max_batched_tokens=chunk
        )
        assert_bit_equal(traces, whole)


def test_cached_prefixes_and_preemption_change_no_bit(packed_rank: OneRank) -> None:
    """Blocks that a window has passed are kept: another request begins with them."""
    (long,) = prompts(7, lengths=(75,))
    asked = [long, long[:74], [*long[:40], *long[:5]]]
    alone = [packed_rank.generate([p], max_tokens=8, kv_dtype="nvfp4")[0] for p in asked]
    assert_bit_equal(packed_rank.generate(asked, max_tokens=8, kv_dtype="nvfp4"), alone)
    tight = packed_rank.generate(
        asked, max_tokens=8, kv_dtype="nvfp4", num_blocks=11, prefix_caching=False
    )
    assert packed_rank.num_preemptions > 0
    assert_bit_equal(tight, alone)


def test_sinks_and_windows_decide(packed_rank: OneRank, twins: tuple[Path, Path]) -> None:
    """Else parity would also hold where both sides ignore them."""
    asked = prompts(7, lengths=(40,))
    first = packed_rank.generate(asked, max_tokens=1)[0].logits[0]
    for change in ("sinks", "window"):
        other = OneRank.load(twins[1])
        for attention in other.transformer._attentions:
            without = {"sinks": {"sinks_N": None}, "window": {"window": None}}[change]
            attention.layer = replace(attention.layer, **without)  # type: ignore[attr-defined]
        changed_logits = other.generate(asked, max_tokens=1)[0].logits[0]
        assert float((changed_logits - first).abs().max()) > 0.05


def test_sinks_weigh_the_same_beside_keys_that_are_centred_and_scaled(
    packed_rank: OneRank,
) -> None:
    """A centre takes one constant from all of a query's scores, and so from a sink's."""
    asked = prompts(7, lengths=(40,))
    plain = packed_rank.generate(asked, max_tokens=3)[0]
    generator = torch.Generator().manual_seed(1)
    attention = packed_rank.arch.grouped_query
    shape = (attention.num_kv_heads, attention.head_dim)
    scales = [
        LayerScales(
            key_center_ND=torch.randn(shape, generator=generator),
            key_channel_ND=torch.rand(shape, generator=generator) + 0.5,
        )
        for _ in range(packed_rank.arch.num_layers)
    ]
    scheduler, _ = packed_rank.engine()
    cache = KvCache.allocate(packed_rank.arch, KvConfig(dtype="fp32"), 16, scales=scales)
    treated = Trace()
    scheduler.add(Generation("r", tuple(asked[0]), SamplingParams(max_tokens=3)))
    run_all(scheduler, Runner(packed_rank.transformer, cache), packed_rank.moe, {"r": treated})
    assert treated.tokens == plain.tokens
    torch.testing.assert_close(
        torch.stack(treated.logits), torch.stack(plain.logits), rtol=0, atol=1e-4
    )


@pytest.fixture
def copy(twins: tuple[Path, Path], tmp_path: Path) -> Path:
    """An MXFP4 checkpoint that a test may damage."""
    return Path(shutil.copytree(twins[0], tmp_path / "copy"))


def rewrite(path: Path, **changes: Tensor | None) -> None:
    file = path / "model.safetensors"
    content = {**load_file(file), **changes}
    kept = {name: tensor for name, tensor in content.items() if tensor is not None}
    save_file(kept, file, metadata={"format": "pt"})


BYTE = torch.uint8


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("gate_up_proj_scales", None, "gate_up_proj_scales is missing"),
        ("down_proj_blocks", None, "down_proj_blocks is missing"),
        ("down_proj_bias", None, "down_proj_bias is missing"),
        (
            "gate_up_proj_blocks",
            torch.zeros(8, 192, 2, 8, dtype=BYTE),
            r"proj_blocks has shape \[8, 192, 2, 8\], config.json asks for \[8, 192, 2, 16\]",
        ),
        (
            "down_proj_scales",
            torch.zeros(8, 64, 2, dtype=BYTE),
            r"down_proj_scales has shape \[8, 64, 2\], config.json asks for \[8, 64, 3\]",
        ),
        ("down_proj_scales", torch.zeros(8, 64, 3), "dtype F32; readable: U8"),
    ],
)
def test_missing_and_wrong_tensors_are_named(
    copy: Path, name: str, tensor: Tensor | None, message: str
) -> None:
    rewrite(copy, **{f"{EXPERTS}.{name}": tensor})
    with pytest.raises(ModelUnreadable, match=message):
        Checkpoint(copy, load_architecture(copy))


@pytest.mark.parametrize("name", ["self_attn.sinks", "mlp.router.bias", "self_attn.o_proj.bias"])
def test_a_missing_shared_tensor_is_named(copy: Path, name: str) -> None:
    rewrite(copy, **{f"model.layers.3.{name}": None})
    with pytest.raises(ModelUnreadable, match=rf"tensor model.layers.3.{name} is missing"):
        Checkpoint(copy, load_architecture(copy))


def test_floats_where_the_config_says_four_bits_are_refused(copy: Path, floats: Path) -> None:
    shutil.copy(floats / "model.safetensors", copy / "model.safetensors")
    with pytest.raises(ModelUnreadable, match=r"gate_up_proj_blocks is missing"):
        Checkpoint(copy, load_architecture(copy))
