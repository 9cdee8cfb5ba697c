"""Speed of one rank's step without exchange: prefill and decode tokens per second of CPU time.

Usage: python -m bench.bench_one_rank [--model DIR] [--kv nvfp4]. Without --model a random Mixtral
of the example's size is made in a temporary folder. CPU time of one thread, so a busy machine
disturbs less; a number, not a test.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch

from moe_worker.engine.sampling_params import SamplingParams
from moe_worker.engine.sequence import Sequence
from tests.support.models import save_random_mixtral
from tests.support.one_rank import OneRank


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--kv", default="nvfp4", choices=["fp32", "bf16", "nvfp4"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        rank = OneRank.load(args.model or example_sized(Path(folder)))
        print(f"kv {args.kv}, {rank.arch.dtype} weights")
        for num_seqs, prompt_tokens in ((1, 512), (8, 128), (1, 32), (8, 64), (16, 128), (64, 256)):
            measure(rank, args.kv, num_seqs, prompt_tokens)


def example_sized(path: Path) -> Path:
    return save_random_mixtral(
        path,
        top_k=2,
        num_experts=12,
        num_layers=4,
        hidden=160,
        num_heads=5,
        num_kv_heads=5,
        intermediate=224,
        vocab_size=2048,
        dtype=torch.bfloat16,
    )


def measure(rank: OneRank, kv: str, num_seqs: int, prompt_tokens: int) -> None:
    max_tokens = 32
    scheduler, runner = rank.engine(
        kv_dtype=kv,
        num_blocks=num_seqs * (prompt_tokens + max_tokens + 16) // 16 + num_seqs,
        max_batched_tokens=2048,
        max_running=num_seqs,
    )
    generator = torch.Generator().manual_seed(0)
    for index in range(num_seqs):
        ids = torch.randint(0, rank.arch.vocab_size, (prompt_tokens,), generator=generator)
        params = SamplingParams(max_tokens=max_tokens)
        scheduler.add(Sequence(str(index), tuple(ids.tolist()), params))
    seconds = {"prefill": 0.0, "decode": 0.0}
    tokens = {"prefill": 0, "decode": 0}
    while scheduler.has_work:
        begun = time.process_time()
        schedule = scheduler.schedule()
        scheduler.commit(schedule, runner.run(schedule, rank.moe))
        phase = "decode" if schedule.num_tokens == schedule.num_samples else "prefill"
        seconds[phase] += time.process_time() - begun
        tokens[phase] += schedule.num_tokens
    rates = ", ".join(f"{phase} {tokens[phase] / seconds[phase]:.0f} tok/s" for phase in seconds)
    print(f"{num_seqs} sequences of {prompt_tokens} tokens: {rates}")


if __name__ == "__main__":
    main()
