"""What every engine is given: the same shapes, the same number of steps, random token ids.

Neighbours: `ours`, `transformers_engine` and `llama_engine` run it, `table` shows what came of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

DECODE_BATCHES = (1, 4, 16, 64)
PROMPT_TOKENS = 32
STEPS, SKIPPED_STEPS = 40, 3
"""Steps of a decode row, and how many of the first are not counted."""
STEP_BUDGET_SECONDS, FEWEST_STEPS = 8.0, 8
"""A slow engine makes fewer steps."""
PREFILL_TOKENS, PREFILLS = 512, 6
CONTEXT_TOKENS, CONTEXT_BATCH, CONTEXT_STEPS = 2048, 16, 16
LOGIT_PROMPTS, LOGIT_TOKENS = 8, 40
"""Of the check that all engines compute the same model."""
ROWS = (
    *(f"decode-{batch}" for batch in DECODE_BATCHES),
    "prefill", "context", "arrivals", "ttft", "logits", "warm-up",
)  # fmt: skip


ClockName = Literal["wall", "cpu"]
"""cpu: processor time of the engine's process ÷ its threads, for a machine that others use too."""


@dataclass(frozen=True)
class Task:
    """What one process measures, in one round."""

    model: str
    rows: tuple[str, ...]
    threads: int
    round: int
    folder: str
    """Where engines put what is compared, and find the GGUF file."""
    kernels: str = "auto"
    clock: ClockName = "wall"

    @property
    def model_path(self) -> Path:
        return Path(self.model)

    @property
    def now(self) -> Callable[[], float]:
        """Seconds, of which only differences mean something."""
        if self.clock == "wall":
            return time.perf_counter
        return lambda: time.process_time() / self.threads

    def wants(self, row: str) -> bool:
        return row in self.rows


@dataclass(frozen=True)
class Figure:
    """What one engine needed for one row in one round."""

    row: str
    variant: str
    """Of the engine: a dtype, a KV format, an option; "" = there is one only."""
    value: float
    unit: str
    """tok/s (more is better) or ms, s (less is better)."""
    quick: float | None = None
    """The same by the fastest decile instead of the median: for a machine that does other work."""
    details: dict[str, Any] | None = None

    def to_wire(self) -> dict[str, Any]:
        return asdict(self)


Tell = Callable[[Figure], None]


def random_ids(seed: int, vocab_size: int, *shape: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.random.default_rng(seed).integers(0, vocab_size, shape)


def timed_steps(
    now: Callable[[], float],
    step: Callable[[int], object],
    steps: int,
    skipped: int = SKIPPED_STEPS,
) -> list[float]:
    """Seconds of each of up to so many calls, the first ones left out."""
    began, found = time.perf_counter(), []
    for number in range(steps):
        start = now()
        step(number)
        found.append(now() - start)
        if len(found) >= FEWEST_STEPS and time.perf_counter() - began > STEP_BUDGET_SECONDS:
            break
    return found[skipped:]


def rate(row: str, variant: str, tokens: int, seconds: list[float], **details: Any) -> Figure:
    """Tokens a second, of calls that took `seconds` each for so many tokens."""
    middle, quick = np.median(seconds), np.quantile(seconds, 0.1)
    return Figure(
        row, variant, float(tokens / middle), "tok/s", float(tokens / quick),
        {"calls": len(seconds), **details},
    )  # fmt: skip


def duration(row: str, variant: str, seconds: list[float], **details: Any) -> Figure:
    """Milliseconds a call."""
    middle, quick = np.median(seconds), np.quantile(seconds, 0.1)
    return Figure(
        row, variant, float(middle * 1e3), "ms", float(quick * 1e3),
        {"calls": len(seconds), **details},
    )  # fmt: skip


def logits_file(folder: Path, engine: str, variant: str) -> Path:
    return folder / f"logits-{engine}-{variant}.npy"


def keep_logits(task: Task, engine: str, variant: str, logits: np.ndarray[Any, Any]) -> None:
    """Float32 [prompts, vocabulary], for a comparison when all engines have run."""
    np.save(logits_file(Path(task.folder), engine, variant), logits)
