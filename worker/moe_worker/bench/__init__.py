"""Measure a server of OpenAI's API: this project's workers or any other.

Sends streamed completions to --url and to nobody else, and reports latencies, throughput and how
every request ended.

  --concurrency N  closed loop: N users, each sends the next request when the last one is answered
  --rate R         open loop: R requests a second on average, at random (Poisson), however slow the
                   server is. Every latency counts from when a request was due, not from when a
                   connection was free for it: a server that falls behind can not hide it
                   (no coordinated omission).

  --profile        no server at all: the engine of --model DIR runs in this process, and the table
                   tells where a step goes, by part, for 1, 4, 16, 64 sequences and a prefill

Exit code: 0 every request was answered, 1 some were not (see --allow-failures), 2 it could not
begin, 130 interrupted; Ctrl-C shows what was measured so far.
"""

from __future__ import annotations

import argparse
import sys

from moe_worker.bench.arguments import add_arguments, options_of, profile_options_of
from moe_worker.bench.bench_error import BenchError

__all__ = ["add_arguments", "run"]


def run(parsed: argparse.Namespace) -> int:
    """Measure; returns the exit code."""
    try:
        if parsed.profile:
            from moe_worker.bench.profile_session import run_profile

            return run_profile(profile_options_of(parsed), parsed.json)
        options = options_of(parsed)  # a mistake is told before anything is imported
        from moe_worker.bench.session import run_session

        return run_session(options)
    except BenchError as error:
        print(f"moe-worker bench: {error}", file=sys.stderr)
        return 2
