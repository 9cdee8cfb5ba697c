"""This project's engine, whole: its thread, scheduler, sampling, prefix cache, events.

Its token ids are random because they are drawn at a temperature at which all are as likely, so the
cost of sampling is in every step; the other engines are fed random ids and take an argmax. A step's
time is from its end to the next one's end, what lies between them included.
Neighbours: `moe_worker.bench.solo` is the engine, `serving` has the rows that only it has.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any

import numpy as np

from bench.engines import serving, workload
from bench.engines.cold_start import measure_starts
from bench.engines.workload import Figure, Task, Tell
from moe_api.worker import WorkerConfig
from moe_worker.bench.solo import KvFormatName, Shape, SoloEngine, random_answer, running
from moe_worker.bench.steady import SPARE_STEPS, Steady, decode
from moe_worker.bench.step_log import Step, StepLog
from moe_worker.engine.sampling_params import SamplingParams

COUNTED_STEPS = 10
"""At the end of a row, in which touched experts are counted; not among the timed ones."""
SHORT_ROWS = {*(f"decode-{batch}" for batch in workload.DECODE_BATCHES), "arrivals", "ttft"}


def measure(task: Task, tell: Tell) -> None:
    if SHORT_ROWS.union(("prefill", "logits")).intersection(task.rows):
        with _engine(task, "nvfp4") as solo:
            _short_rows(task, solo, tell)
    if task.wants("prefill") and "batch_invariant" in WorkerConfig.model_fields:
        with _engine(task, "nvfp4", batch_invariant=False) as solo:
            tell(_prefill(solo, task.round, "batchInvariant: false"))
    for kv in ("bf16", "nvfp4"):
        if task.wants("context"):
            with _engine(task, kv) as solo:
                tell(_context(solo, task.round, kv))
    if task.wants("logits") and task.round == 0:
        with _engine(task, "bf16") as solo:
            _logits(solo, task, "bf16")
    if task.wants("warm-up") and task.round == 0:
        measure_starts(task, tell)


def _short_rows(task: Task, solo: SoloEngine, tell: Tell) -> None:
    for batch in workload.DECODE_BATCHES:
        if task.wants(f"decode-{batch}"):
            tell(_decode(solo, batch, task.round))
    if task.wants("prefill"):
        tell(_prefill(solo, task.round, "batchInvariant"))
    if task.wants("arrivals"):
        tell(serving.arrivals(solo, task.round))
    if task.wants("ttft"):
        tell(serving.time_to_first_token(solo, task.round))
    if task.wants("logits") and task.round == 0:
        _logits(solo, task, "nvfp4")


def _engine(task: Task, kv: KvFormatName, **options: Any) -> AbstractContextManager[SoloEngine]:
    longest = workload.CONTEXT_TOKENS + SPARE_STEPS + workload.STEPS + COUNTED_STEPS
    shape = Shape(kv=kv, kv_tokens=workload.CONTEXT_BATCH * longest, options=options)
    log = StepLog(task.now)
    return running(task.model_path, shape, task.kernels, task.threads, lambda *_: None, log)


def _decode(solo: SoloEngine, batch: int, seed: int) -> Figure:
    seconds, touched = _steady(solo, batch, workload.PROMPT_TOKENS, workload.STEPS, seed)
    return workload.rate(f"decode-{batch}", "nvfp4", batch, seconds, touched=touched)


def _context(solo: SoloEngine, seed: int, variant: str) -> Figure:
    seconds, touched = _steady(
        solo, workload.CONTEXT_BATCH, workload.CONTEXT_TOKENS, workload.CONTEXT_STEPS, seed
    )
    return workload.duration("context", variant, seconds, touched=touched)


def _steady(
    solo: SoloEngine, batch: int, prompt_tokens: int, steps: int, seed: int
) -> tuple[list[float], float]:
    """Seconds of steps in which all sequences decode, and the experts that a layer touches."""
    loaded, counts = solo.loaded, []
    counted_from = workload.SKIPPED_STEPS + steps
    steady = Steady(batch, prompt_tokens, counted_from + COUNTED_STEPS, seed)
    num_full = 0

    def count(step: Step) -> None:
        nonlocal num_full
        num_full += steady.is_full(step)
        if num_full > counted_from:
            counts.append(np.asarray(loaded.counters.snapshot().served_LS))

    seconds = decode(solo, steady, count)[workload.SKIPPED_STEPS : counted_from]
    touched = [(after > before).sum(axis=1).mean() for before, after in pairwise(counts)]
    return seconds, float(np.mean(touched))


def _prefill(solo: SoloEngine, seed: int, variant: str) -> Figure:
    """Each prompt alone and new to the prefix cache; drawing its first token is in the time."""
    seconds = []
    for number in range(workload.PREFILLS + 1):
        solo.log.clear()
        prompt = solo.random_ids(10_000 + 100 * seed + number, workload.PREFILL_TOKENS)
        began = solo.log.clock()
        solo.ask(prompt, random_answer(1, number)).wait()
        seconds.append(solo.log.steps[-1].ended_seconds - began)
    return workload.rate("prefill", variant, workload.PREFILL_TOKENS, seconds[1:])


def _logits(solo: SoloEngine, task: Task, variant: str) -> None:
    """Logits after each prompt of the check, kept for comparison."""
    vocab_size = solo.arch.vocab_size
    prompts = workload.random_ids(0, vocab_size, workload.LOGIT_PROMPTS, workload.LOGIT_TOKENS)
    rows = []
    for prompt in prompts.tolist():
        solo.ask(prompt, SamplingParams(max_tokens=1)).wait()
        logits = solo.loaded.runner.last_logits
        assert logits is not None, "a step was made"
        rows.append(logits[0].numpy().copy())
    workload.keep_logits(task, "ours", variant, np.stack(rows))
