"""The whole engine beside transformers and llama.cpp, in one run, and what the machine could do.

    python -m bench.engine                                            # all of it, about 10 minutes
    python -m bench.engine --engines ours --rows decode-1,decode-16   # while working on a kernel
    python -m bench.engine --rounds 4 --json result.json

Engines take turns, each in a process of its own, with the same number of threads. Ours is the whole
engine: its thread, scheduler, sampling, prefix cache and events, KV in NVFP4; only HTTP is missing.
The model is a random Qwen3-MoE of 111 M parameters in BF16 (hidden 512, 8 layers, 8/4 heads of 64,
32 experts of 256, top-4, vocabulary 4096), made for the run, unless --model names another.

rows
  decode-B   B sequences with a prompt of 32 tokens decode at once. Token ids are random: ours are
             drawn at a temperature at which all are as likely (that sampling is in its steps), the
             others are fed random ids and take an argmax. The last column tells how many experts a
             layer touches in a step of ours.
  prefill    a prompt of 512 tokens, new to the prefix cache; with batchInvariant on, and off
  context    16 sequences decode after 2048 tokens each: ms a step by KV format
  arrivals   16 users whose requests have other lengths, so that they begin and end in any step
  ttft       time to first token of prompts of 128 tokens, while 16 sequences decode
  logits     all engines compute the same: largest difference from transformers in FP32
  warm-up    seconds until kernels are ready: nothing cached, and from the cache on disk

transformers runs with grouped_mm, its best, in BF16 and FP32; the better one is shown. llama.cpp
needs `pip install -e '.[bench]'` (it is compiled for this machine); without it its columns stay
empty. Not a test: on a machine that does other work use more rounds, --fastest or --clock cpu.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
from rich.console import Console

from bench.engines import comparison, floor, random_model, rounds, table, workload
from bench.engines.rounds import EngineEnded, Measured
from bench.engines.workload import Figure, Task
from moe_api.worker import KvConfig
from moe_worker.model.config import load_architecture
from moe_worker.model.kv_layout import kv_bytes_per_token

BF16_BYTES = 2
REFERENCE = ("transformers", "fp32")


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    engines = [engine for engine in options.engines if _is_there(engine)]
    with tempfile.TemporaryDirectory(prefix="bench-engine-") as folder:
        model = options.model or random_model.write(Path(folder) / "random-qwen3-moe-111m")
        task = Task(
            str(model), options.rows, options.threads, 0, folder, options.kernels, options.clock
        )
        try:
            measured = rounds.run(task, engines, options.rounds, _tell_progress)
        except EngineEnded as error:
            print(f"bench.engine: {error}", file=sys.stderr)
            return 1
        agreement = logit_differences(Path(folder)) if task.wants("logits") else {}
        # A random model lies in the folder, which is about to go.
        show(model, measured, agreement, options)
    return 0


def show(
    model: Path, measured: list[Measured], agreement: dict[str, str], options: argparse.Namespace
) -> None:
    arch = load_architecture(model)
    kv_bytes = {kv: kv_bytes_per_token(arch, KvConfig(dtype=kv)) for kv in ("bf16", "nvfp4")}
    lines = comparison.lines(measured, floor.sizes(arch, BF16_BYTES), kv_bytes, options.fastest)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    print(f"{model.name}, {options.threads} threads, {options.rounds} rounds, "
          f"{'fastest decile' if options.fastest else 'median'} of a round's steps")  # fmt: skip
    console.print(table.render(lines))
    for text in table.below(lines, comparison.roof_of(measured)):
        console.print(text)
    for name, difference in agreement.items():
        print(f"logits of {name} against {' '.join(REFERENCE)}: {difference}")
    if options.json is not None:
        found = {"setting": {"model": model.name, "threads": options.threads},
                 "logits": agreement,
                 "figures": [asdict(each) for each in measured],
                 "lines": [asdict(line) for line in lines]}  # fmt: skip
        options.json.write_text(json.dumps(found, indent=1) + "\n")


def logit_differences(folder: Path) -> dict[str, str]:
    """By engine and variant: the largest difference relative to the largest logit, and in how many
    prompts the likeliest token is another."""
    reference = workload.logits_file(folder, *REFERENCE)
    if not reference.exists():
        return {}
    wanted = np.load(reference)
    found = {}
    for path in sorted(folder.glob("logits-*.npy")):
        if path == reference:
            continue
        got = np.load(path)
        difference = np.abs(got - wanted).max() / np.abs(wanted).max()
        same = int((got.argmax(-1) == wanted.argmax(-1)).sum())
        name = path.stem.removeprefix("logits-").replace("-", " ")
        found[name] = f"{difference:.1e} of the largest, the likeliest token is the same in " \
                      f"{same} of {len(wanted)} prompts"  # fmt: skip
    return found


def parser() -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    made = argparse.ArgumentParser("bench.engine", description=__doc__, formatter_class=formatter)
    made.add_argument(
        "--engines", type=_names(rounds.ENGINES), default=rounds.ENGINES, metavar="A,B",
        help=f"some of {','.join(rounds.ENGINES)} (default: all)",
    )  # fmt: skip
    made.add_argument(
        "--rows", type=_names(workload.ROWS), default=workload.ROWS, metavar="A,B",
        help=f"some of {','.join(workload.ROWS)} (default: all)",
    )  # fmt: skip
    made.add_argument("--rounds", type=int, default=2, help="default: %(default)s")
    made.add_argument(
        "--threads", type=int, default=os.cpu_count(), help="of each engine (default: %(default)s)"
    )
    made.add_argument("--model", type=Path, metavar="DIR", help="default: a random one")
    made.add_argument("--kernels", default="auto", help="of ours: auto, cpu, reference")
    made.add_argument(
        "--clock", choices=("wall", "cpu"), default="wall",
        help="cpu: processor time ÷ threads, where others use the machine too (default: wall)",
    )  # fmt: skip
    made.add_argument(
        "--fastest", action="store_true", help="compare the fastest decile of steps, not medians"
    )
    made.add_argument("--json", type=Path, metavar="FILE", help="every figure of every round")
    return made


def _names(known: Sequence[str]):  # type: ignore[no-untyped-def]
    def parse(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r}: must be some of {','.join(known)}")
        return names

    return parse


def _is_there(engine: str) -> bool:
    missing = rounds.missing_packages(engine)
    if missing:
        print(f"{engine}: left out, {', '.join(missing)} is not installed", file=sys.stderr)
    return not missing


def _tell_progress(number: int, engine: str, figure: Figure) -> None:
    text = f"round {number + 1} {engine} {figure.row} {figure.variant}: {figure.value:.4g}"
    print(f"{text} {figure.unit}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
