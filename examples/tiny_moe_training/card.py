"""Writes the model card from the measures, the sources and the way it was trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiny_moe_training.model import ModelConfig

FRONT = """\
---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
language: [en, de, fr, es]
tags: [mixtral, mixture-of-experts, tiny]
---

# tiny-moe

A small Mixture-of-Experts language model in the Mixtral layout, for the demo and the tests of
moe-operator. It is a test load with real routing, not an assistant: it writes text that looks
like Python, like English documentation, or like German, French or Spanish messages, and what it
says is mostly untrue.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained("examples/tiny-moe")
model = AutoModelForCausalLM.from_pretrained("examples/tiny-moe")
```
"""

HOLDOUT = """\
Held-out text is in `heldout/`: whole files that training never saw, nor their docstrings, nor
conversations made from them. Other files may quote the same sentences (a docstring may repeat a
sentence of the documentation). It keeps the licence of its source. Windows of {window} tokens
without overlap, weights as stored (BF16) computed in FP32. The byte 3-gram model (interpolated
Witten-Bell) is counted on the same training text, once on all of it and once on the same kind
only.
"""


def card(metrics: dict[str, Any]) -> str:
    """The text of README.md."""
    return "\n".join(
        [
            FRONT,
            _architecture(metrics),
            _measures(metrics),
            _samples(metrics),
            _training(metrics),
            _sources(metrics),
        ]
    )


def write_card(folder: Path, metrics: dict[str, Any]) -> None:
    (folder / "README.md").write_text(card(metrics), encoding="utf-8")


def _architecture(metrics: dict[str, Any]) -> str:
    c = ModelConfig()
    return f"""\
## Architecture

* `MixtralForCausalLM`, {metrics["parameters"]:,} parameters in BF16
* {c.num_hidden_layers} layers, hidden size {c.hidden_size}
* {c.num_attention_heads} attention heads of {c.head_dim}, {c.num_key_value_heads} KV heads
* {c.num_local_experts} experts of width {c.intermediate_size}, {c.num_experts_per_tok} per token
* byte-level BPE of {c.vocab_size} tokens
* trained on sequences of {metrics["training"]["sequence_tokens"]} tokens (longer ones get worse),
  positions up to {c.max_position_embeddings}

Chat: `<|user|>`, `<|assistant|>`, and `<|end|>` after each turn, which is also the end-of-text
token (see `chat_template` in `tokenizer_config.json`). A text begins best after an `<|end|>`.
"""


def _measures(metrics: dict[str, Any]) -> str:
    layers = range(ModelConfig().num_hidden_layers)
    lines = [
        "## Measures\n",
        HOLDOUT.format(window=metrics["window_tokens"]),
        "| held-out text | bits per byte | 3-gram, all text | 3-gram, same kind |",
        "|---|---|---|---|",
    ]
    for kind, bits in metrics["bits_per_byte"].items():
        trigram = metrics["trigram"][kind]
        row = f"{bits:.2f} | {trigram['all_text']:.2f} | {trigram['same_kind']:.2f}"
        lines.append(f"| {kind} | {row} |")
    lines += [
        "",
        "Use of experts. Imbalance is the load of the fullest of 3 ranks divided by the mean load,",
        "experts in contiguous blocks of 4 (the identity placement).\n",
        "| | " + " | ".join(f"layer {layer}" for layer in layers) + " |",
        "|---|" + "---|" * len(layers),
    ]
    for name, values in metrics["experts"].items():
        lines.append(f"| {name} | " + " | ".join(f"{value:.2f}" for value in values) + " |")
    turns = metrics["chat_turns"]
    lines.append(
        "\n*Generated code* is traffic like the demo's: the code prompts of `prompts.json`, as\n"
        "completions and as chat, prompts and answers together. Of "
        f"{turns['turns']} greedy chat answers of\nat most {turns['max_tokens']} tokens, "
        f"{turns['ended']} ended with `<|end|>`.\n"
    )
    return "\n".join(lines)


def _samples(metrics: dict[str, Any]) -> str:
    lines = [
        "## Samples\n",
        "Greedy, the continuation after `⏵`; greedy answers soon repeat themselves. A prompt\n"
        "should not end in white space: the tokens of an indentation hold its line break too.\n",
    ]
    for sample in _shown(metrics["samples"]):
        end = "<|end|>" if sample["ended"] else " …"
        lines += ["```text", f"{sample['prompt']}⏵{sample['answer']}{end}", "```\n"]
    return "\n".join(lines)


def _shown(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first two completions of each kind and two chats of each kind."""
    shown: list[dict[str, Any]] = []
    for kind in dict.fromkeys(sample["kind"] for sample in samples):
        shown += [sample for sample in samples if sample["kind"] == kind][:2]
    return shown


def _training(metrics: dict[str, Any]) -> str:
    t = metrics["training"]
    method = (
        f"the auxiliary loss E·Σ fᵢ·Pᵢ times {t['auxiliary_coefficient']}, which is low: experts\n"
        "  may specialise, so that one kind of traffic loads few of them"
        if t["balancing"] == "loss"
        else f"a bias on the router logits, step {t['bias_step']}, faded out before the end"
    )
    tokens = t["steps"] * t["batch_sequences"] * t["sequence_tokens"]
    return f"""\
## Training

`examples/train_tiny_moe.py`, seed {t["seed"]}:

* {t["steps"]} steps of {t["batch_sequences"]} × {t["sequence_tokens"]} tokens, together
  {tokens / 1e6:.1f} million
* AdamW, highest learning rate {t["learning_rate"]}
* noise on the router logits: {t["router_noise"]}
* balanced by {method}
"""


def _sources(metrics: dict[str, Any]) -> str:
    lines = [
        "## Text and licences\n",
        "The weights are Apache-2.0, like the project. They were trained on these texts:\n",
        "| source | version | licence | bytes |",
        "|---|---|---|---|",
    ]
    for s in metrics["sources"]:
        lines.append(f"| {s['name']} | {s['version']} | {s['licence']} | {s['bytes']:,} |")
    lines.append("\nHeld-out files (their licences are in `heldout/LICENCES.txt`):\n")
    for kind, names in metrics["heldout_files"].items():
        lines.append(f"* `heldout/{kind}.txt`: " + ", ".join(f"`{n}`" for n in names))
    return "\n".join(lines) + "\n"
