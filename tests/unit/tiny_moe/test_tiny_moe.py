"""The committed model of examples/tiny-moe keeps what its card promises.

`transformers` is the model here, so that the checkpoint is judged by other code than trained it.

Shapes: L layers, E experts, N tokens, R ranks.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

FOLDER = Path(__file__).parents[3] / "examples" / "tiny-moe"
KINDS = ("code", "english", "other")
MAX_BYTES = 8_000_000
RANKS = 3


@dataclasses.dataclass(frozen=True)
class Reading:
    bits_per_byte: float
    expert_counts_LE: torch.Tensor


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    return json.loads((FOLDER / "config.json").read_text())


@pytest.fixture(scope="module")
def metrics() -> dict[str, Any]:
    return json.loads((FOLDER / "metrics.json").read_text())


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def readings(model: Any, tokenizer: Any, metrics: dict[str, Any]) -> dict[str, Reading]:
    return {
        kind: read(model, tokenizer, heldout_text(kind), metrics["window_tokens"]) for kind in KINDS
    }


def heldout_text(kind: str) -> str:
    return (FOLDER / "heldout" / f"{kind}.txt").read_text(encoding="utf-8")


@torch.inference_mode()
def read(model: Any, tokenizer: Any, text: str, window_tokens: int) -> Reading:
    """As the card measures: windows without overlap, each after an end token; full windows are
    read eight at a time, the rest alone."""
    ids = torch.tensor(tokenizer.encode(text, add_special_tokens=False))
    full = len(ids) // window_tokens * window_tokens
    batches = [*ids[:full].view(-1, window_tokens).split(8), ids[full:].view(1, -1)]
    nats = 0.0
    counts_LE = torch.zeros(model.config.num_hidden_layers, model.config.num_local_experts)
    for windows in batches:
        rows = functional.pad(windows, (1, 0), value=tokenizer.eos_token_id)
        out = model(rows[:, :-1], output_router_logits=True, use_cache=False)
        logits, targets = out.logits.flatten(0, 1), rows[:, 1:].flatten()
        nats += float(functional.cross_entropy(logits, targets, reduction="sum"))
        for layer, logits_NE in enumerate(out.router_logits):
            chosen = logits_NE.topk(model.config.num_experts_per_tok, -1).indices.flatten()
            counts_LE[layer] += torch.bincount(chosen, minlength=counts_LE.shape[1])
    return Reading(nats / math.log(2) / len(text.encode()), counts_LE)


def imbalance(counts_LE: torch.Tensor) -> list[float]:
    loads_LR = counts_LE.reshape(len(counts_LE), RANKS, -1).sum(-1)
    return (loads_LR.amax(-1) / loads_LR.mean(-1)).tolist()


def test_weights_are_small_bf16_and_named_as_in_the_hub(config: dict[str, Any]) -> None:
    path = FOLDER / "model.safetensors"
    assert path.stat().st_size <= MAX_BYTES
    with safe_open(path, framework="pt") as file:
        names = set(file.keys())
        assert {str(file.get_tensor(name).dtype) for name in names} == {"torch.bfloat16"}
    layers, experts = config["num_hidden_layers"], config["num_local_experts"]
    parts = ["input_layernorm", "post_attention_layernorm", "block_sparse_moe.gate"]
    parts += [f"self_attn.{p}_proj" for p in "qkvo"]
    parts += [
        f"block_sparse_moe.experts.{expert}.{matrix}"
        for expert in range(experts)
        for matrix in ("w1", "w2", "w3")
    ]
    expected = {f"model.layers.{layer}.{part}.weight" for layer in range(layers) for part in parts}
    expected |= {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    assert names == expected


def test_configuration_suits_the_worker(config: dict[str, Any]) -> None:
    assert config["architectures"] == ["MixtralForCausalLM"]
    assert 8 <= config["num_local_experts"] <= 16
    assert config["num_local_experts"] % RANKS == 0
    assert config["num_hidden_layers"] >= 4
    assert config["head_dim"] % 16 == 0  # FP4 blocks of 16 values
    assert config["max_position_embeddings"] >= 2048


def test_tokenizer_keeps_every_text(tokenizer: Any) -> None:
    samples = [
        "",
        " a  b\n\tc",
        "Größe für Übung",
        "déjà vu à l'œuvre",
        "日本語 Ελληνικά 🙂",
        "\x00\x7f",
    ]
    for text in [*samples, *(heldout_text(kind)[:20_000] for kind in KINDS)]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text


def test_tokenizer_file_alone_gives_the_same_tokens(tokenizer: Any) -> None:
    plain = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    text = "<|user|>\ndef straße(x):<|end|>\n<|assistant|>\n"
    assert plain.encode(text).ids == tokenizer.encode(text)
    assert [plain.token_to_id(t) for t in ("<|end|>", "<|user|>", "<|assistant|>")] == [0, 1, 2]


def test_chat_template_renders_turns(tokenizer: Any, config: dict[str, Any]) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": "Grüße"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|user|>\nBe brief.\n\nHi<|end|>\n<|assistant|>\nYes?<|end|>\n"
        "<|user|>\nGrüße<|end|>\n<|assistant|>\n"
    )
    assert tokenizer.eos_token == "<|end|>"
    assert tokenizer.eos_token_id == config["eos_token_id"]


def test_chat_template_without_a_system_message(tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<|user|>\nHi<|end|>\n"


@pytest.mark.parametrize("kind", ["code", "english"])
def test_heldout_text_is_learned(
    readings: dict[str, Reading], metrics: dict[str, Any], kind: str
) -> None:
    bits, trigram = readings[kind].bits_per_byte, metrics["trigram"][kind]
    assert bits <= 2.5
    assert bits < min(trigram["all_text"], trigram["same_kind"])


@pytest.mark.parametrize("kind", KINDS)
def test_card_numbers_are_those_of_this_checkpoint(
    readings: dict[str, Reading], metrics: dict[str, Any], kind: str
) -> None:
    assert readings[kind].bits_per_byte == pytest.approx(metrics["bits_per_byte"][kind], abs=0.005)
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert f"| {kind} | {metrics['bits_per_byte'][kind]:.2f} |" in card


def test_code_and_english_use_other_experts(readings: dict[str, Reading]) -> None:
    p, q = (
        readings[kind].expert_counts_LE / readings[kind].expert_counts_LE.sum(-1, keepdim=True)
        for kind in ("code", "english")
    )
    variation_L = (p - q).abs().sum(-1) / 2
    assert int((variation_L >= 0.15).sum()) * 2 >= len(variation_L)


def test_code_alone_is_imbalanced_on_three_ranks(readings: dict[str, Reading]) -> None:
    assert max(imbalance(readings["code"].expert_counts_LE)) >= 1.3


def test_token_counts_are_all_tokens(readings: dict[str, Reading], tokenizer: Any) -> None:
    for kind in KINDS:
        tokens = len(tokenizer.encode(heldout_text(kind), add_special_tokens=False))
        assert readings[kind].expert_counts_LE.sum(-1).tolist() == [2 * tokens] * 4


def test_every_expert_is_used(readings: dict[str, Reading]) -> None:
    total_LE = torch.stack([readings[kind].expert_counts_LE for kind in KINDS]).sum(0)
    assert int(total_LE.min()) > 0


def test_model_ends_its_turn(model: Any, tokenizer: Any) -> None:
    prompts = json.loads((FOLDER / "prompts.json").read_text(encoding="utf-8"))

    def ends(question: str) -> bool:
        messages = [{"role": "user", "content": question}]
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        out = model.generate(**inputs, max_new_tokens=64, do_sample=False)
        return int(out[0, -1]) == tokenizer.eos_token_id

    assert any(ends(question) for question in prompts["chat_english"] + prompts["chat_code"])


def test_heldout_files_come_with_licences(metrics: dict[str, Any]) -> None:
    licences = (FOLDER / "heldout" / "LICENCES.txt").read_text(encoding="utf-8")
    for names in metrics["heldout_files"].values():
        assert names
        assert all(name in licences for name in names)
    for source in metrics["sources"]:
        assert source["licence"]
