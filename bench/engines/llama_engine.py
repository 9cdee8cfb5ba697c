"""llama.cpp by way of llama-cpp-python's C API, with BF16 weights from a GGUF file written here.

Its batches are filled from Python, which costs it 0.1–0.2 ms a step at 64 sequences.
Neighbours: `workload` says what is run, `gguf_file` writes the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llama_cpp as llama
import numpy as np

from bench.engines import gguf_file, workload
from bench.engines.workload import Figure, Task, Tell

Ids = Sequence[Sequence[int]]
BATCH_TOKENS = 2048
CONTEXT_MULTIPLE = 256
KV_FORMATS = {"f16": llama.GGML_TYPE_F16, "q4_0": llama.GGML_TYPE_Q4_0}
_FLASH_ATTENTION_ON = 1


@llama.llama_log_callback
def _silent(level: int, text: bytes, data: object) -> None:
    """It tells about every tensor otherwise."""


def measure(task: Task, tell: Tell) -> None:
    llama.llama_backend_init()
    llama.llama_log_set(_silent, None)
    path = Path(task.folder) / "model-bf16.gguf"
    if not path.exists():
        gguf_file.write(task.model_path, path)
    parameters = llama.llama_model_default_params()
    parameters.use_mmap = False
    model = llama.llama_model_load_from_file(str(path).encode(), parameters)
    if not model:
        raise RuntimeError(f"llama.cpp cannot read {path}")
    engine = LlamaEngine(model, task.threads, task.now)
    system = llama.llama_print_system_info().decode().strip()
    for batch in workload.DECODE_BATCHES:
        if task.wants(f"decode-{batch}"):
            seconds = engine.decode(batch, workload.PROMPT_TOKENS, workload.STEPS, task.round)
            tell(workload.rate(f"decode-{batch}", "bf16", batch, seconds, system=system))
    if task.wants("prefill"):
        tell(engine.prefill(task.round))
    if task.wants("context"):
        for kv in KV_FORMATS:
            seconds = engine.decode(
                workload.CONTEXT_BATCH, workload.CONTEXT_TOKENS, workload.CONTEXT_STEPS,
                task.round, kv,
            )  # fmt: skip
            tell(workload.duration("context", kv, seconds))
    if task.wants("logits") and task.round == 0:
        workload.keep_logits(task, "llama.cpp", "bf16", engine.logits())
    llama.llama_model_free(model)


@dataclass(frozen=True)
class LlamaEngine:
    model: Any
    threads: int
    now: Callable[[], float]

    @property
    def vocab_size(self) -> int:
        return int(llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self.model)))

    def decode(
        self, batch: int, prompt_tokens: int, steps: int, seed: int, kv: str = "f16"
    ) -> list[float]:
        """Seconds of steps of `batch` sequences, each fed a random token."""
        most = steps + workload.SKIPPED_STEPS
        prompts = workload.random_ids(seed, self.vocab_size, batch, prompt_tokens).tolist()
        fed = workload.random_ids(seed + 1, self.vocab_size, most, batch, 1).tolist()
        with self._context(batch, prompt_tokens + most, kv) as context:
            context.feed(prompts, 0)

            def step(number: int) -> None:
                context.feed(fed[number], prompt_tokens + number)
                context.last_logits(batch).argmax(-1).tolist()

            return workload.timed_steps(self.now, step, most)

    def prefill(self, seed: int) -> Figure:
        calls, tokens = workload.PREFILLS + 1, workload.PREFILL_TOKENS
        prompts = workload.random_ids(seed, self.vocab_size, calls, 1, tokens).tolist()
        with self._context(1, tokens, "f16") as context:

            def step(number: int) -> None:
                context.clear()
                context.feed(prompts[number], 0)
                context.last_logits(1).argmax(-1).tolist()

            seconds = workload.timed_steps(self.now, step, calls, skipped=1)
        return workload.rate("prefill", "bf16", tokens, seconds)

    def logits(self) -> np.ndarray[Any, Any]:
        """After each prompt of the check, float32 [prompts, vocabulary]."""
        count, tokens = workload.LOGIT_PROMPTS, workload.LOGIT_TOKENS
        prompts = workload.random_ids(0, self.vocab_size, count, tokens).tolist()
        with self._context(count, tokens, "f16") as context:
            context.feed(prompts, 0)
            return context.last_logits(count).copy()

    @contextmanager
    def _context(self, sequences: int, tokens: int, kv: str) -> Iterator[_Context]:
        """Room for so many sequences of so many tokens."""
        each = -(-tokens // CONTEXT_MULTIPLE) * CONTEXT_MULTIPLE
        parameters = llama.llama_context_default_params()
        parameters.n_seq_max, parameters.n_ctx = sequences, each * sequences
        parameters.n_batch, parameters.n_ubatch = BATCH_TOKENS, 512
        parameters.n_threads = parameters.n_threads_batch = self.threads
        parameters.type_k = parameters.type_v = KV_FORMATS[kv]
        parameters.flash_attn_type = _FLASH_ATTENTION_ON
        parameters.kv_unified, parameters.no_perf = False, True
        handle = llama.llama_init_from_model(self.model, parameters)
        if not handle:
            raise RuntimeError(f"llama.cpp makes no context of {sequences} × {each} tokens, {kv}")
        tokens_of_batch = llama.llama_batch_init(BATCH_TOKENS, 0, 1)
        try:
            yield _Context(handle, tokens_of_batch, self.vocab_size)
        finally:
            llama.llama_batch_free(tokens_of_batch)
            llama.llama_free(handle)


@dataclass(frozen=True)
class _Context:
    handle: Any
    batch: Any
    vocab_size: int

    def clear(self) -> None:
        llama.llama_memory_clear(llama.llama_get_memory(self.handle), True)

    def feed(self, ids: Ids, start: int) -> None:
        """Tokens of each sequence from position `start`; logits of each one's last are wanted."""
        at_once = max(1, BATCH_TOKENS // len(ids[0]))
        for first in range(0, len(ids), at_once):
            self._decode(ids[first : first + at_once], first, start)

    def last_logits(self, rows: int) -> np.ndarray[Any, Any]:
        """Of the sequences fed last, float32 [rows, vocabulary]; llama.cpp's own memory."""
        return np.ctypeslib.as_array(
            llama.llama_get_logits(self.handle), shape=(rows, self.vocab_size)
        )

    def _decode(self, ids: Ids, first: int, start: int) -> None:
        batch, filled = self.batch, 0
        for sequence, tokens in enumerate(ids, start=first):
            for position, token in enumerate(tokens, start=start):
                batch.token[filled], batch.pos[filled] = token, position
                batch.n_seq_id[filled], batch.seq_id[filled][0] = 1, sequence
                batch.logits[filled] = position + 1 == start + len(tokens)
                filled += 1
        batch.n_tokens = filled
        status = llama.llama_decode(self.handle, batch)
        if status:
            raise RuntimeError(f"llama_decode: {status}")
