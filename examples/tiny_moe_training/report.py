"""Measures a model folder as a whole: metrics.json, the printed table, and what is not reached.

`kept` is what only training knows (3-gram results, sources, settings); it is stored in
metrics.json, so that a later `--evaluate` keeps it.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch

from tiny_moe_training import checkpoint, heldout, measure
from tiny_moe_training.corpus import HELDOUT_KINDS, KINDS, Corpus
from tiny_moe_training.trainer import TrainingConfig
from tiny_moe_training.trigram import ByteTrigram
from tiny_moe_training.vocabulary import ASSISTANT, END, USER

KEPT = ("training", "window_tokens", "trigram", "sources", "heldout_files")
MAX_BITS_PER_BYTE = 2.5
MIN_TOTAL_VARIATION = 0.15
MIN_IMBALANCE = 1.3
ANSWER_TOKENS = 64
CHAT_KINDS = ("chat_code", "chat_english")
CODE_KINDS = ("code", "chat_code")


def known_from_training(corpus: Corpus, config: TrainingConfig) -> dict[str, Any]:
    """What the checkpoint does not tell: the yardstick, the text and the settings."""
    everything = ByteTrigram(d for kind in KINDS for d in corpus.documents[kind])
    trigram = {}
    for kind in HELDOUT_KINDS:
        same_kind = ByteTrigram(corpus.documents[kind])
        trigram[kind] = {
            "all_text": everything.bits_per_byte(corpus.heldout[kind]),
            "same_kind": same_kind.bits_per_byte(corpus.heldout[kind]),
        }
    return {
        "training": dataclasses.asdict(config),
        "window_tokens": config.sequence_tokens,
        "trigram": trigram,
        "sources": [
            {"name": s.name, "version": s.version, "licence": s.licence, "bytes": size}
            for s, size in sorted(corpus.bytes_by_source.items(), key=lambda item: item[0].name)
        ],
        "heldout_files": {
            kind: sorted(file.name for file in files)
            for kind, files in corpus.heldout_files.items()
        },
    }


def kept_parts(folder: Path) -> dict[str, Any]:
    """What an earlier run stored in metrics.json and the model itself does not tell."""
    metrics = json.loads((folder / "metrics.json").read_text())
    return {name: metrics[name] for name in KEPT}


def measure_folder(folder: Path, kept: dict[str, Any]) -> dict[str, Any]:
    """All measures of the model in `folder`, with its held-out texts and prompts."""
    model, tokenizer = checkpoint.load_model(folder), checkpoint.load_tokenizer(folder)
    prompts = json.loads((folder / "prompts.json").read_text())
    texts = {
        kind: measure.measure_text(model, tokenizer, text, kept["window_tokens"])
        for kind, text in heldout.read(folder / "heldout").items()
    }
    counts = {kind: text.expert_counts_LE for kind, text in texts.items()}
    samples, generated_LE = [], []
    for kind, items in prompts.items():
        for item in items:
            text = f"{USER}\n{item}{END}\n{ASSISTANT}\n" if kind in CHAT_KINDS else item
            answer, ended, counts_LE = measure.continue_text(model, tokenizer, text, ANSWER_TOKENS)
            samples.append({"kind": kind, "prompt": text, "answer": answer, "ended": ended})
            if kind in CODE_KINDS:
                generated_LE.append(counts_LE)
    chat_ended = [sample["ended"] for sample in samples if sample["kind"] in CHAT_KINDS]
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "bits_per_byte": {kind: text.bits_per_byte for kind, text in texts.items()},
        "experts": {
            "total variation, code and English": measure.total_variation(
                counts["code"], counts["english"]
            ),
            "total variation, English and other": measure.total_variation(
                counts["english"], counts["other"]
            ),
            "imbalance, code": measure.imbalance(counts["code"]),
            "imbalance, English": measure.imbalance(counts["english"]),
            "imbalance, other": measure.imbalance(counts["other"]),
            "imbalance, generated code": measure.imbalance(torch.stack(generated_LE).sum(0)),
        },
        "chat_turns": {
            "ended": sum(chat_ended),
            "turns": len(chat_ended),
            "max_tokens": ANSWER_TOKENS,
        },
        "samples": samples,
        **kept,
    }


def write(folder: Path, metrics: dict[str, Any]) -> None:
    text = json.dumps(_rounded(metrics), indent=1, ensure_ascii=False)
    (folder / "metrics.json").write_text(text + "\n", encoding="utf-8")


def table(metrics: dict[str, Any]) -> str:
    """The measures for a terminal."""
    lines = [f"{'bits per byte':36} {'model':>7} {'3-gram':>7} {'3-gram, same kind':>18}"]
    for kind, value in metrics["bits_per_byte"].items():
        trigram = metrics["trigram"][kind]
        row = f"{value:7.3f} {trigram['all_text']:7.3f} {trigram['same_kind']:18.3f}"
        lines.append(f"{kind:36} {row}")
    for name, values in metrics["experts"].items():
        lines.append(f"{name:36} " + " ".join(f"{value:7.2f}" for value in values))
    return "\n".join(lines)


def failures(metrics: dict[str, Any]) -> list[str]:
    """The demands on the demo's model that this one does not meet."""
    found = []
    for kind in ("code", "english"):
        bits, trigram = metrics["bits_per_byte"][kind], metrics["trigram"][kind]
        bound = min(MAX_BITS_PER_BYTE, trigram["all_text"], trigram["same_kind"])
        if bits > bound:
            found.append(f"{kind}: {bits:.2f} bits per byte, must be at most {bound:.2f}")
    variation = metrics["experts"]["total variation, code and English"]
    if sum(v >= MIN_TOTAL_VARIATION for v in variation) * 2 < len(variation):
        found.append(
            f"total variation of expert use {variation}, must be at least {MIN_TOTAL_VARIATION} "
            "in half of the layers"
        )
    for name in ("imbalance, code", "imbalance, generated code"):
        if max(metrics["experts"][name]) < MIN_IMBALANCE:
            found.append(
                f"{name} {max(metrics['experts'][name]):.2f}, must be at least {MIN_IMBALANCE}; "
                "lower --auxiliary-coefficient or --bias-step"
            )
    return found


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 5)
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return value
