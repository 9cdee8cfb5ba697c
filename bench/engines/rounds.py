"""Rounds of all engines in turn, each in a process of its own, and all figures of all rounds.

A round goes through the machine's roof and every engine, so that a busy minute hits all of them.
`python -m bench.engines.rounds ENGINE TASK` is the process of one; it prints a JSON object a line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from importlib.util import find_spec

from bench.engines.workload import Figure, Task

MODULES = {
    "roof": "bench.engines.roof",
    "ours": "bench.engines.ours",
    "transformers": "bench.engines.transformers_engine",
    "llama": "bench.engines.llama_engine",
}
ENGINES = ("ours", "transformers", "llama")
NEEDS = {"transformers": ("transformers",), "llama": ("llama_cpp", "gguf")}
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
MARK = "figure "
SHOWN_LINES = 15

Heard = Callable[[int, str, Figure], None]
"""Round, engine, figure: as they come."""


class EngineEnded(RuntimeError):
    """An engine's process failed; the message has the end of what it told."""


@dataclass(frozen=True)
class Measured:
    round: int
    engine: str
    figure: Figure


def missing_packages(engine: str) -> list[str]:
    return [name for name in NEEDS.get(engine, ()) if find_spec(name) is None]


def run(task: Task, engines: Sequence[str], rounds: int, heard: Heard) -> list[Measured]:
    """Raises EngineEnded."""
    found = []
    for number in range(rounds):
        for engine in ("roof", *engines):
            for figure in figures(engine, replace(task, round=number)):
                found.append(Measured(number, engine, figure))
                heard(number, engine, figure)
    return found


def figures(engine: str, task: Task) -> Iterator[Figure]:
    """Of one engine in one round, as they come. Raises EngineEnded."""
    threads = dict.fromkeys(THREAD_VARIABLES, str(task.threads))
    with tempfile.TemporaryFile("w+") as told:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, engine, json.dumps(asdict(task))],
            stdout=subprocess.PIPE, stderr=told, text=True, env=os.environ | threads,
        )  # fmt: skip
        with process:
            assert process.stdout is not None, "asked for as a pipe"
            try:
                for line in process.stdout:
                    if line.startswith(MARK):
                        yield Figure(**json.loads(line.removeprefix(MARK)))
            except BaseException:
                process.terminate()
                raise
        if process.returncode:
            told.seek(0)
            last = "".join(told.readlines()[-SHOWN_LINES:])
            raise EngineEnded(f"{engine} ended with {process.returncode}:\n{last}")


def main(engine: str, given: str) -> None:
    fields = json.loads(given)
    task = Task(**{**fields, "rows": tuple(fields["rows"])})

    def tell(figure: Figure) -> None:
        print(MARK + json.dumps(figure.to_wire()), flush=True)

    import_module(MODULES[engine]).measure(task, tell)


if __name__ == "__main__":
    main(*sys.argv[1:])
