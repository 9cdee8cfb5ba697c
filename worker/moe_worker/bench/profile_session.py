"""From the options of a profile to its exit code: run, show progress, tell.

Neighbours: `moe_worker.bench` has the flags, `profile` is the run.
"""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from moe_kernels import implementation
from moe_worker.bench.profile import ProfileOptions, profiles, to_wire
from moe_worker.bench.profile_table import render
from moe_worker.bench.session import STDOUT, check_writable, write_json

INTERRUPTED = 130


def run_profile(options: ProfileOptions, json_path: Path | None) -> int:
    """Exit code: 0, 130 interrupted.

    Raises:
        BenchError: it could not begin, or its result could not be written.
    """
    check_writable(json_path)
    progress = Console(stderr=True)
    found, kernels = [], options.kernels
    try:
        with progress.status("loading") as status:
            for profile in profiles(options, status.update):
                found.append(profile)
                kernels = implementation.chosen()
    except KeyboardInterrupt:
        progress.print("interrupted before all was measured")
        return INTERRUPTED
    heading = f"{options.model.name}: kernels {kernels}, {options.threads} threads, KV {options.kv}"
    Console(stderr=json_path == STDOUT, highlight=False).print(render(found, heading))
    if json_path is not None:
        write_json(to_wire(options, kernels, found), json_path)
    return 0
