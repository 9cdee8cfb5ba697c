"""The parts of the training script: text in, the hub's model out, and the yardsticks."""

from __future__ import annotations

import dataclasses
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_moe_training import (
    balance,
    chat,
    checkpoint,
    corpus,
    measure,
    prose,
    report,
    sources,
    trainer,
)
from tiny_moe_training.model import ModelConfig, Routing, TinyMoE
from tiny_moe_training.trigram import ByteTrigram
from tiny_moe_training.vocabulary import train_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

SMALL = ModelConfig(
    vocab_size=300,
    hidden_size=32,
    intermediate_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    num_local_experts=6,
)
TRAINING = trainer.TrainingConfig(
    steps=6,
    seed=3,
    sequence_tokens=16,
    batch_sequences=4,
    learning_rate=1e-2,
    balancing="loss",
    auxiliary_coefficient=0.01,
    bias_step=0.1,
    router_noise=0.1,
    warmup_steps=2,
)

PAGE = """\
:mod:`queue` --- A synchronized queue class
===========================================

.. module:: queue
   :synopsis: A queue.

The :mod:`queue` module implements *multi-producer* queues, see `the guide <https://x.org>`_ too.

.. function:: put(item, block=True)

   Put ``item`` into the queue and wait until a free slot is available::

      code = that(is) + not_prose

   >>> put(1)
   1

.. code-block:: python

   Another line that looks like a sentence but is the body of a silent directive.

/usr/share/doc/this/is/a/path and some words that follow it here.
"""


def small_model(seed: int = 0) -> TinyMoE:
    torch.manual_seed(seed)
    return TinyMoE(SMALL)


def test_our_model_is_the_hubs_mixtral(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["größer als alles, said the code"] * 50, SMALL.vocab_size)
    made = small_model()
    checkpoint.save_model(made, tokenizer, tmp_path)
    loaded = checkpoint.load_model(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    rounded = made.to(torch.bfloat16).float()
    tokens_BT = torch.randint(SMALL.vocab_size, (2, 40))
    with torch.inference_mode():
        expected = theirs(tokens_BT).logits
        for ours in (rounded, loaded):
            torch.testing.assert_close(ours(tokens_BT)[0], expected, atol=1e-5, rtol=1e-5)


def test_missing_checkpoint_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(checkpoint.UnreadableCheckpointError, match=r"config\.json"):
        checkpoint.load_model(tmp_path)


def test_routed_rows_match_one_expert_at_a_time() -> None:
    moe = small_model().layers[0].block_sparse_moe
    x_NH = torch.randn(37, SMALL.hidden_size)
    out = moe(x_NH, torch.zeros(SMALL.num_local_experts), 0.0, Routing([], []))
    for row, got in zip(x_NH, out, strict=True):
        weights, experts = moe.gate(row).softmax(-1).topk(2)
        expected = sum(
            weight
            / weights.sum()
            * (moe.w2[e] @ (torch.nn.functional.silu(moe.w1[e] @ row) * (moe.w3[e] @ row)))
            for weight, e in zip(weights, experts, strict=True)
        )
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)


def test_permutation_has_the_gradient_of_indexing() -> None:
    x_NH = torch.randn(5, SMALL.hidden_size, requires_grad=True)
    moe = small_model().layers[0].block_sparse_moe
    moe(x_NH, torch.zeros(6), 0.0, Routing([], [])).square().sum().backward()
    assert x_NH.grad is not None
    step = 1e-3 * x_NH.grad / x_NH.grad.norm()

    def value(x: torch.Tensor) -> float:
        return float(moe(x, torch.zeros(6), 0.0, Routing([], [])).square().sum())

    with torch.no_grad():
        slope = (value(x_NH + step) - value(x_NH - step)) / 2e-3
    assert slope == pytest.approx(float(x_NH.grad.norm()), rel=2e-2)


def test_auxiliary_loss_is_k_in_balance_and_more_when_experts_are_preferred() -> None:
    even = Routing([torch.full((6, 3), 1 / 3)], [torch.tensor([4, 4, 4])])
    assert float(balance.auxiliary_loss(even)) == pytest.approx(2.0)
    # By hand: f = (6/6, 6/6, 0), P = (.5, .3, .2) gives 3·(.5 + .3).
    uneven = Routing([torch.tensor([[0.5, 0.3, 0.2]] * 6)], [torch.tensor([6, 6, 0])])
    assert float(balance.auxiliary_loss(uneven)) == pytest.approx(2.4)


def test_bias_moves_against_the_load() -> None:
    bias_LE = balance.moved_bias(torch.zeros(1, 3), [torch.tensor([9, 3, 6])], 0.5)
    assert bias_LE.tolist() == [[-0.5, 0.5, 0.0]]


def test_bias_and_rate_are_gone_at_the_last_step() -> None:
    config = dataclasses.replace(TRAINING, steps=100)
    assert trainer.faded(0, config) == 1.0
    assert trainer.faded(99, config) == 0.0
    assert 0.0 < trainer.schedule(90, config) < trainer.schedule(70, config) < 1.0


@pytest.mark.parametrize("balancing", ["loss", "bias"])
def test_an_interrupted_run_ends_with_the_same_weights(tmp_path: Path, balancing: str) -> None:
    config = dataclasses.replace(TRAINING, balancing=balancing)
    streams = {kind: torch.randint(SMALL.vocab_size, (500,)) for kind in corpus.KINDS}
    whole, second = small_model(), small_model(seed=9)

    def keep(model: TinyMoE) -> None:
        pass

    class Interrupted(Exception):
        pass

    def interrupt(model: TinyMoE) -> None:
        raise Interrupted

    trainer.train(whole, streams, config, tmp_path / "whole.pt", keep, 100)
    with pytest.raises(Interrupted):
        trainer.train(small_model(), streams, config, tmp_path / "half.pt", interrupt, 3)
    trainer.train(second, streams, config, tmp_path / "half.pt", keep, 100)
    for one, other in zip(whole.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)


def test_trigram_probabilities_sum_to_one_and_favour_what_was_seen() -> None:
    model = ByteTrigram(["abcabcabd", "abc"])
    for context in (b"ab", b"zz", b"za"):
        grams = (context[0] * 256 + context[1]) * 256 + torch.arange(256)
        probabilities = model.probabilities(grams)
        assert float(probabilities.sum()) == pytest.approx(1.0)
    after_ab = model.probabilities((ord("a") * 256 + ord("b")) * 256 + torch.arange(256))
    assert int(after_ab.argmax()) == ord("c")
    assert model.bits_per_byte("abcabc") < model.bits_per_byte("xyzxyz")


def test_trigram_matches_witten_bell_by_hand() -> None:
    # "aab": P1(b) = 2/259, P2(b|a) = (1 + 2·P1)/(2 + 2), P3(b|aa) = (1 + 1·P2)/(1 + 1).
    p1 = 2 / 259
    p2 = (1 + 2 * p1) / 4
    expected = -math.log2((1 + p2) / 2)
    assert ByteTrigram(["aab"]).bits_per_byte("aab") == pytest.approx(expected)


def test_pages_become_sentences_without_markup_code_and_paths() -> None:
    text, entries = prose.read_page(PAGE)
    assert text.split("\n\n") == [
        "The queue module implements multi-producer queues, see the guide too.",
        "Put item into the queue and wait until a free slot is available:",
    ]
    assert [entry.name for entry in entries] == ["queue", "put"]


@pytest.mark.parametrize(
    "text",
    [
        "too short.",
        "lower case begins this sentence, which is long enough otherwise.",
        "No end of the sentence here although it has many words in it",
        "A line with x = y + (z * 3) != [0, 1, 2, 3, 4] and {a: b} in it.",
        "Read the file /usr/share/doc/package/README for the whole story of it.",
    ],
)
def test_what_is_not_prose_is_dropped(text: str) -> None:
    assert not prose.is_prose(text)


def test_code_that_does_not_parse_gives_no_docstrings_and_no_chat() -> None:
    assert prose.read_docstrings("def broken(:") == ("", [])
    assert chat.about_code("def broken(:", random.Random(0)) == []


def test_conversations_are_what_the_chat_template_renders(tmp_path: Path) -> None:
    checkpoint.save_model(small_model(), train_tokenizer(["text"], 300), tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    messages = [
        {"role": "user", "content": "Was?"},
        {"role": "assistant", "content": "Das."},
        {"role": "user", "content": "Und?"},
        {"role": "assistant", "content": "So."},
    ]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    assert rendered == chat.conversation([("Was?", "Das."), ("Und?", "So.")])


def test_code_is_asked_for_by_its_docstring() -> None:
    code = (
        "class A:\n"
        "    def size(self):\n"
        '        """Return the number of all items in the list."""\n'
        "        return len(self.items)\n"
    )
    (text,) = chat.about_code(code, random.Random(0))
    assert "size" in text
    assert '\ndef size(self):\n    """Return' in text


@pytest.mark.parametrize(
    ("licence", "allowed"),
    [
        ("MIT", True),
        ("BSD-3-Clause AND 0BSD AND (MIT OR Zlib)", True),
        ("License :: OSI Approved :: Apache Software License", True),
        ("Apache-2.0 WITH LLVM-exception", True),
        ("MPL-2.0 AND MIT", False),
        ("GPL-3.0-or-later", False),
        ("LicenseRef-NVIDIA-Proprietary", False),
        ("", False),
    ],
)
def test_licences(licence: str, allowed: bool) -> None:
    assert sources.is_permissive(licence) is allowed


def test_heldout_files_are_whole_and_never_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "HELDOUT_BYTES", {"code": 4_000, "english": 0, "other": 0})
    source = sources.Source("Python standard library", "3", "PSF-2.0")
    files = []
    for i in range(6):
        path = tmp_path / f"m{i}.py"
        path.write_text(f'"""Module number {i} of these."""\n' + f"value_{i} = {i}\n" * 150)
        files.append(sources.TextFile("python", path.name, path, source))
    text = corpus.build(files, seed=0)
    kept = {file.name for file in text.heldout_files["code"]}
    assert 0 < len(kept) < 6
    for file in files:
        code = file.path.read_text()
        assert (code in text.documents["code"]) is (file.name not in kept)
        assert (code.strip() in text.heldout["code"]) is (file.name in kept)
    assert corpus.build(files, seed=0) == text


def test_missing_pages_tell_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(sources.UnusableSourceError, match="python3-doc"):
        sources.find_files([], tmp_path)


def test_total_variation_and_imbalance_by_hand() -> None:
    one, other = torch.tensor([[6, 2, 0]]), torch.tensor([[2, 2, 4]])
    assert measure.total_variation(one, other) == pytest.approx([0.5])
    assert measure.imbalance(one, ranks=3) == pytest.approx([2.25])


def good_metrics() -> dict[str, Any]:
    return {
        "bits_per_byte": {"code": 2.0, "english": 2.2},
        "trigram": {k: {"all_text": 3.0, "same_kind": 2.9} for k in ("code", "english")},
        "experts": {
            "total variation, code and English": [0.3, 0.1, 0.2, 0.0],
            "imbalance, code": [1.2, 1.6],
            "imbalance, generated code": [1.5, 1.1],
        },
    }


def test_a_good_model_has_no_failures() -> None:
    assert report.failures(good_metrics()) == []


@pytest.mark.parametrize(
    ("part", "name", "value", "message"),
    [
        ("bits_per_byte", "code", 2.6, "code: 2.60 bits"),
        ("trigram", "english", {"all_text": 2.1, "same_kind": 2.9}, "english: 2.20 bits"),
        ("experts", "total variation, code and English", [0.3, 0, 0, 0], "total variation"),
        ("experts", "imbalance, code", [1.2, 1.1], "auxiliary-coefficient"),
    ],
)
def test_each_demand_is_checked(part: str, name: str, value: object, message: str) -> None:
    metrics = good_metrics()
    metrics[part][name] = value
    (failure,) = report.failures(metrics)
    assert message in failure
