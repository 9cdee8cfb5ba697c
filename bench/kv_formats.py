"""What a KV format costs in quality: next tokens and perplexity against BF16, on held-out text.

    python -m bench.kv_formats [--model examples/tiny-moe] [--text FILE …] [--sequences 16]
    python -m bench.kv_formats --write-scales examples/tiny-moe/kv-scales.json

The text's sequences are read from the cache position by position, as serving does. Agreement is
the share of positions whose likeliest next token is BF16's; error is the relative L2 error of
stored keys and values. Center and Channel are calibrated on other sequences of the same text;
`--write-scales` writes that calibration as a file for `kvCache.scalesFile` and ends.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from moe_api.worker import KvConfig
from moe_kernels import kv_pages
from moe_kernels.kv_pages import LayerScales
from moe_kernels.step_tokens import StepTokens
from moe_worker.engine.kv import KvCache
from moe_worker.model.kv_layout import kv_bytes_per_token
from tests.support.one_rank import OneRank

TINY_MOE = Path(__file__).parent.parent / "examples" / "tiny-moe"
CALIBRATION_SEQUENCES = 8

CASES: tuple[tuple[str, dict[str, str], str], ...] = (
    ("bf16", {"dtype": "bf16"}, ""),
    ("fp32", {"dtype": "fp32"}, ""),
    ("fp8", {"dtype": "fp8"}, ""),
    ("k8v4", {"dtype": "k8v4"}, ""),
    ("k8v4 FourOverSix", {"dtype": "k8v4", "encoding": "FourOverSix"}, ""),
    ("nvfp4", {"dtype": "nvfp4"}, ""),
    ("nvfp4 FourOverSix", {"dtype": "nvfp4", "encoding": "FourOverSix"}, ""),
    ("nvfp4 Center", {"dtype": "nvfp4"}, "Center"),
    ("nvfp4 Channel", {"dtype": "nvfp4"}, "Channel"),
    ("mxfp4", {"dtype": "mxfp4"}, ""),
)
"""Name, options of the cache, and which calibration it uses."""


@dataclass(frozen=True)
class Outcome:
    logits: list[Tensor]
    """Float32 [T, V] of each sequence."""
    stored: list[tuple[Tensor, Tensor]]
    """Keys and values [L, T, N, D] that were read back, of each sequence."""


def main() -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--model", type=Path, default=TINY_MOE)
    parser.add_argument("--text", type=Path, nargs="+")
    parser.add_argument("--sequences", type=int, default=16, help="per text (default: 16)")
    parser.add_argument("--length", type=int, default=512, help="tokens each (default: 512)")
    parser.add_argument("--write-scales", type=Path, metavar="FILE")
    args = parser.parse_args()
    texts = args.text or [args.model / "heldout" / f"{name}.txt" for name in ("english", "code")]
    rank = OneRank.load(args.model)
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    wanted = args.sequences + CALIBRATION_SEQUENCES
    sequences = [list(cut(tokenizer, text, args.length, wanted)) for text in texts]
    calibration = calibrate(rank, [seq for text in sequences for seq in text[args.sequences :]])
    if args.write_scales:
        write_scales(args.write_scales, calibration)
        return
    measured = [seq for text in sequences for seq in text[: args.sequences]]
    report(rank, measured, calibration)


def cut(tokenizer: Tokenizer, text: Path, length: int, wanted: int) -> Iterator[list[int]]:
    """The first `wanted` sequences of `length` tokens. Raises ValueError when there are fewer."""
    ids = tokenizer.encode(text.read_text(encoding="utf-8"), add_special_tokens=False).ids
    if len(ids) < wanted * length:
        raise ValueError(f"{text} has {len(ids)} tokens, {wanted} sequences of {length} are wanted")
    for begin in range(0, wanted * length, length):
        yield ids[begin : begin + length]


@torch.inference_mode()
def run(
    rank: OneRank, sequences: list[list[int]], kv: KvConfig, scales: list[LayerScales] | None = None
) -> Outcome:
    logits, stored = [], []
    for ids in sequences:
        num_blocks = -(-len(ids) // kv.block_size)
        cache = KvCache.allocate(rank.arch, kv, num_blocks, scales=scales)
        # From nothing, and the logits of every position are wanted.
        step = StepTokens(
            np.array(ids),
            np.array([[0, len(ids), num_blocks]]),
            np.arange(num_blocks),
            np.arange(len(ids)),
            kv.block_size,
        )
        logits.append(rank.transformer.forward(step, cache, rank.moe))
        blocks = torch.arange(num_blocks)[None]
        layers = [_as_given(cache, layer, blocks, len(ids)) for layer in range(len(cache.layers))]
        keys, values = zip(*layers, strict=True)
        stored.append((torch.stack(keys), torch.stack(values)))
    return Outcome(logits, stored)


def _as_given(cache: KvCache, layer: int, blocks: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Keys and values [T, N, D] of a layer, with what was done to keys undone."""
    pages = cache.layers[layer]
    k, v = (x[0].transpose(0, 1)[:length] for x in kv_pages.read(pages, blocks))
    if pages.key_channel_ND is not None:
        k = k * pages.key_channel_ND
    return (k if pages.key_center_ND is None else k + pages.key_center_ND), v


def calibrate(rank: OneRank, sequences: list[list[int]]) -> dict[str, list[LayerScales]]:
    """Per layer the mean, and the root mean square, of every channel of keys."""
    outcome = run(rank, sequences, KvConfig(dtype="fp32"))
    keys_LTND = torch.cat([keys for keys, _ in outcome.stored], dim=1)
    return {
        "Center": [LayerScales(key_center_ND=mean) for mean in keys_LTND.mean(dim=1)],
        "Channel": [
            LayerScales(key_channel_ND=size) for size in keys_LTND.square().mean(dim=1).sqrt()
        ],
    }


def write_scales(path: Path, calibration: dict[str, list[LayerScales]]) -> None:
    layers = []
    for layer, scales in enumerate(zip(*calibration.values(), strict=True)):
        center, channel = scales[0].key_center_ND, scales[1].key_channel_ND
        assert center is not None
        assert channel is not None
        layers.append(
            {
                "layer": layer,
                "keyCenter": [[round(x, 6) for x in head] for head in center.tolist()],
                "keyChannel": [[round(x, 6) for x in head] for head in channel.tolist()],
            }
        )
    path.write_text(json.dumps({"schema": 1, "layers": layers}), encoding="utf-8")


def report(
    rank: OneRank, sequences: list[list[int]], calibration: dict[str, list[LayerScales]]
) -> None:
    print(f"{len(sequences)} sequences of {len(sequences[0])} tokens, {rank.arch.dtype} weights")
    exact = run(rank, sequences, KvConfig(dtype="fp32"))
    base = run(rank, sequences, KvConfig(dtype="bf16"))
    print(f"{'format':<18} {'bytes/token':>11} {'error K':>8} {'error V':>8} "
          f"{'agreement':>9} {'perplexity':>10} {'vs bf16':>8}")  # fmt: skip
    for name, options, treatment in CASES:
        kv = KvConfig.model_validate(options)
        outcome = run(rank, sequences, kv, calibration.get(treatment))
        perplexity = perplexity_of(outcome, sequences)
        change = perplexity / perplexity_of(base, sequences) - 1
        print(
            f"{name:<18} {kv_bytes_per_token(rank.arch, kv):>11} "
            f"{error_of(outcome, exact, 0):>8.4f} {error_of(outcome, exact, 1):>8.4f} "
            f"{agreement_of(outcome, base):>9.2%} {perplexity:>10.4f} {change:>+8.2%}"
        )


def perplexity_of(outcome: Outcome, sequences: list[list[int]]) -> float:
    losses = [
        torch.nn.functional.cross_entropy(logits[:-1].double(), torch.tensor(ids[1:]))
        for logits, ids in zip(outcome.logits, sequences, strict=True)
    ]
    return float(torch.stack(losses).mean().exp())


def agreement_of(outcome: Outcome, base: Outcome) -> float:
    equal = [
        (one.argmax(-1) == other.argmax(-1)).double()
        for one, other in zip(outcome.logits, base.logits, strict=True)
    ]
    return float(torch.cat(equal).mean())


def error_of(outcome: Outcome, exact: Outcome, side: int) -> float:
    """Of the first layer, whose keys and values do not depend on how earlier ones were stored."""
    kept, given = (
        torch.cat([stored[side][0] for stored in each.stored]).double() for each in (outcome, exact)
    )
    return float((kept - given).norm() / given.norm())


if __name__ == "__main__":
    main()
