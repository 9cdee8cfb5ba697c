"""From options to exit code: check what can be checked before, run, tell, whatever ended it.

Neighbours: `moe_worker.bench` has the flags, `experiment` is the run.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from moe_worker.bench.bench_error import BenchError
from moe_worker.bench.experiment import Experiment
from moe_worker.bench.options import Options
from moe_worker.bench.prompts import FilePrompt, Synthetic, read_prompts
from moe_worker.bench.report import Ending, Report, report
from moe_worker.bench.table import render
from moe_worker.bench.target import Endpoint

INTERRUPTED = 130
SPARE_FILES = 64
"""Open files beside connections."""
STDOUT = Path("-")


def run_session(options: Options) -> int:
    """Exit code: 0 all answered, 1 some not, 130 interrupted.

    Raises:
        BenchError: it could not begin, or its result could not be written.
    """
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    check_open_files(options.traffic.most_at_once, allowed)
    check_writable(options.json_path)
    found = asyncio.run(_run_until_interrupted(options, read_source(options)))
    if found is None:
        Console(stderr=True).print("interrupted before anything was measured")
        return INTERRUPTED
    tell(found, options.json_path)
    if found.ending is Ending.INTERRUPTED:
        return INTERRUPTED
    return 1 if found.num_failed and not options.allow_failures else 0


def check_open_files(num_connections: int, allowed: int) -> None:
    wanted = num_connections + SPARE_FILES
    if allowed != resource.RLIM_INFINITY and wanted > allowed:
        raise BenchError(
            f"{num_connections} connections need {wanted} open files and this shell allows "
            f"{allowed}: ask for fewer, or raise it with `ulimit -n {wanted}`"
        )


def check_writable(path: Path | None) -> None:
    """Now, and not after an hour of measuring."""
    if path is None or path == STDOUT:
        return
    place = path if path.exists() else path.parent
    if path.is_dir() or not place.exists() or not os.access(place, os.W_OK):
        raise BenchError(f"--json: can not write {path}: name a file in a folder that exists")


def read_source(options: Options) -> list[FilePrompt] | Synthetic:
    if isinstance(options.prompts, Synthetic):
        return options.prompts
    return read_prompts(options.prompts, takes_messages=options.endpoint is Endpoint.CHAT)


def tell(found: Report, json_path: Path | None) -> None:
    """The table for people; JSON where it was asked for."""
    Console(stderr=json_path == STDOUT, highlight=False).print(render(found))
    if json_path is not None:
        write_json(found.to_wire(), json_path)


def write_json(found: Mapping[str, object], json_path: Path) -> None:
    """Raises BenchError."""
    text = json.dumps(found, indent=2, allow_nan=False)
    if json_path == STDOUT:
        print(text)
        return
    try:
        json_path.write_text(text + "\n")
    except OSError as error:
        raise BenchError(f"--json: can not write {json_path}: {error.strerror}") from error


async def _run_until_interrupted(
    options: Options, source: Sequence[FilePrompt] | Synthetic
) -> Report | None:
    """The report of all that was measured; None = interrupted before."""
    loop = asyncio.get_running_loop()
    experiment = Experiment(options, source)
    measuring = asyncio.create_task(experiment.measure())
    interrupted_at: list[float] = []

    def interrupt() -> None:
        interrupted_at.append(loop.time())
        measuring.cancel()
        loop.remove_signal_handler(signal.SIGINT)  # a second one ends the process at once

    loop.add_signal_handler(signal.SIGINT, interrupt)
    try:
        await measuring
    except asyncio.CancelledError:
        if not interrupted_at:
            raise
    finally:
        loop.remove_signal_handler(signal.SIGINT)
    if experiment.measurement is None or experiment.model is None:
        return None
    early = interrupted_at[0] if interrupted_at and not experiment.is_complete else None
    return report(
        experiment.measurement, options.objective, options.setting(experiment.model), early
    )
