"""`moe-worker bench --profile`: where a step of this machine's engine goes, in process, no server.

For each batch the same steps are run three times: unwatched, for their length; watched as they run;
and in parts. Of each, the faster half of the steps counts, because whatever else a machine does
only ever adds. Neighbours: `solo` and `steady` drive the engine, `parts` watches it,
`profile_table` shows the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

from moe_kernels import implementation
from moe_worker.bench.bench_error import BenchError
from moe_worker.bench.parts import COMPOSED, Calls, Watch, mean_of, part_of, parts_by_weights
from moe_worker.bench.solo import KvFormatName, Shape, SoloEngine, random_answer, running
from moe_worker.bench.steady import SPARE_STEPS, Steady, decode
from moe_worker.bench.step_log import Step, StepLog
from moe_worker.engine.observer import StepPhase
from moe_worker.model.config import ModelHasNoExperts, ModelUnreadable, load_architecture

BATCHES = (1, 4, 16, 64)
PROMPT_TOKENS, STEPS, SKIPPED_STEPS = 32, 30, 3
PREFILL_TOKENS, PREFILLS, SKIPPED_PREFILLS = 512, 9, 1
PHASES: tuple[StepPhase, ...] = get_args(StepPhase)


@dataclass(frozen=True)
class ProfileOptions:
    model: Path
    kv: KvFormatName
    kernels: str
    threads: int


@dataclass(frozen=True)
class Profile:
    """Of one kind of step."""

    name: str
    tokens: int
    """Computed in a step."""
    step_seconds: float
    """Unwatched, from end to end."""
    phases: dict[StepPhase, float]
    """Seconds of the unwatched step's phases."""
    as_it_runs: Calls
    """By function."""
    in_parts: Calls
    """By part."""
    in_parts_seconds: float
    """The whole step in parts."""


@dataclass(frozen=True)
class Timed:
    seconds: float
    phases: dict[StepPhase, float]
    calls: Calls


def profiles(options: ProfileOptions, tell: Callable[[str], None]) -> Iterator[Profile]:
    """One after another; `tell` is told what is under way. Kernels are chosen while it runs.

    Raises:
        BenchError: the model or the kernels cannot be used here.
    """
    longest = _longest(options.model)
    prompt = min(PROMPT_TOKENS, longest // 4)
    room = Steady(max(BATCHES), prompt, SKIPPED_STEPS + STEPS).longest * max(BATCHES)
    shape = Shape(
        kv=options.kv, kv_tokens=max(room, 2 * PREFILL_TOKENS), max_running=max(BATCHES),
        max_batched_tokens=4 * PREFILL_TOKENS,
    )  # fmt: skip

    def on_warm_up(done: int, total: int, name: str, seconds: float) -> None:
        tell(f"kernels ready: {done} of {total}")

    try:
        with running(
            options.model, shape, options.kernels, options.threads, on_warm_up, StepLog()
        ) as solo:
            for batch in BATCHES:
                tell(f"decode, B = {batch}")
                yield profile_decode(solo, batch, prompt)
            tell("prefill")
            yield profile_prefill(solo, min(PREFILL_TOKENS, longest - 1))
    except implementation.ImplementationUnavailable as error:
        raise BenchError(f"--kernels: {error}") from error


def profile_decode(solo: SoloEngine, batch: int, prompt_tokens: int) -> Profile:
    """Of steps in which `batch` sequences decode."""

    def run(watch: Watch, seed: int) -> Timed:
        steady = Steady(batch, prompt_tokens, SKIPPED_STEPS + STEPS, seed)
        steps: list[Step] = []
        calls: list[Calls] = []

        def on_step(step: Step) -> None:
            steps.append(step)
            calls.append(watch.take())

        decode(solo, steady, on_step)
        full = [
            (step.ended_seconds - before.ended_seconds, step, called)
            for before, step, called in zip(steps, steps[1:], calls[1:], strict=False)
            if steady.is_full(before) and steady.is_full(step)
        ]
        return _faster_half(full[SKIPPED_STEPS:][:STEPS])

    return _profile(solo, f"B = {batch}", batch, run)


def profile_prefill(solo: SoloEngine, num_tokens: int) -> Profile:
    """Of steps that compute one prompt, new to the prefix cache, and draw its first token."""

    def run(watch: Watch, seed: int) -> Timed:
        found = []
        for number in range(PREFILLS):
            prompt = solo.random_ids(100_000 + 1000 * seed + number, num_tokens)
            solo.log.clear()
            watch.take()
            began = solo.log.clock()
            solo.ask(prompt, random_answer(1, number)).wait()
            step = solo.log.steps[-1]
            found.append((step.ended_seconds - began, step, watch.take()))
        return _faster_half(found[SKIPPED_PREFILLS:])

    return _profile(solo, f"prefill {num_tokens}", num_tokens, run)


def _profile(
    solo: SoloEngine, name: str, tokens: int, run: Callable[[Watch, int], Timed]
) -> Profile:
    by_weights = parts_by_weights(solo.loaded.runner.transformer.shared)
    as_it_runs = Watch(lambda call: call.function)
    in_parts = Watch(lambda call: part_of(call, by_weights), COMPOSED)
    # Prompts of another seed each time: what the prefix cache knows is not computed.
    seed = 10 * tokens
    plain = run(as_it_runs, seed)
    with implementation.watched(as_it_runs):
        watched = run(as_it_runs, seed + 1)
    with implementation.watched(in_parts):
        parted = run(in_parts, seed + 2)
    return Profile(
        name, tokens, plain.seconds, plain.phases, watched.calls, parted.calls, parted.seconds
    )


def _faster_half(steps: Sequence[tuple[float, Step, Calls]]) -> Timed:
    chosen = sorted(steps, key=lambda step: step[0])[: max(1, len(steps) // 2)]
    phases = {
        phase: sum(step.phases.get(phase, 0.0) for _, step, _ in chosen) / len(chosen)
        for phase in PHASES
    }
    seconds = sum(seconds for seconds, _, _ in chosen) / len(chosen)
    return Timed(seconds, phases, mean_of([calls for _, _, calls in chosen]))


def _longest(model: Path) -> int:
    """Tokens of the longest sequence."""
    try:
        longest = load_architecture(model).max_positions
    except (ModelUnreadable, ModelHasNoExperts) as error:
        raise BenchError(f"--model {model}: {error}") from error
    if longest < 2 * (SPARE_STEPS + STEPS):
        raise BenchError(f"--model {model}: sequences of {longest} tokens are too short to profile")
    return longest


def to_wire(options: ProfileOptions, kernels: str, found: Sequence[Profile]) -> dict[str, object]:
    return {
        "schema": 1,
        "setting": {**asdict(options), "model": str(options.model),
                    "kernels": kernels},
        "profiles": [asdict(profile) for profile in found],
    }  # fmt: skip
