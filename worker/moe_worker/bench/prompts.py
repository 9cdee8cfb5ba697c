"""What is sent: prompts of a file, over and over, or synthetic ones without end."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_worker.bench.bench_error import BenchError
from moe_worker.bench.lengths import MAX_TOKENS, Lengths
from moe_worker.bench.words import WordTokens, text_of

MAX_FILE_BYTES = 256 * 2**20
MAX_PROMPTS = 1_000_000
Messages = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Prompt:
    content: str | Messages
    """A text, or the messages of a chat."""
    max_tokens: int


@dataclass(frozen=True)
class FilePrompt:
    content: str | Messages
    max_tokens: int | None
    """None = as the command line says."""


def from_file(
    prompts: Sequence[FilePrompt], max_tokens: Lengths, random_source: random.Random
) -> Iterator[Prompt]:
    """In the order of the file, again and again."""
    for prompt in itertools.cycle(prompts):
        drawn = max_tokens.draw(random_source)
        yield Prompt(prompt.content, prompt.max_tokens or drawn)


@dataclass(frozen=True)
class Synthetic:
    prompt_tokens: Lengths
    shared_prefix_tokens: int
    """Tokens with which all prompts begin alike."""

    def __post_init__(self) -> None:
        if self.shared_prefix_tokens >= self.prompt_tokens.least:
            raise BenchError(
                f"--shared-prefix-tokens {self.shared_prefix_tokens} leaves nothing of a prompt of "
                f"--prompt-tokens {self.prompt_tokens}: make it smaller"
            )

    def prompts(
        self, max_tokens: Lengths, scale: WordTokens, prefix: random.Random, rest: random.Random
    ) -> Iterator[Prompt]:
        """Random words; `prefix` draws those that all begin with, `rest` everything else."""
        shared = text_of(scale.words_within(self.shared_prefix_tokens), prefix)
        num_shared = len(shared.split())
        while True:
            num_words = scale.words_for(self.prompt_tokens.draw(rest)) - num_shared
            own = text_of(max(1, num_words), rest)
            yield Prompt(f"{shared} {own}".lstrip(), max_tokens.draw(rest))


def read_prompts(path: Path, takes_messages: bool) -> list[FilePrompt]:
    """A `.jsonl` file has an object a line: `prompt` or `messages`, and perhaps `max_tokens`; any
    other file has a prompt a line. Empty lines are skipped.

    Raises:
        BenchError: naming the file and the line.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise BenchError(f"--prompts: {path} is larger than {MAX_FILE_BYTES} bytes: send less")
        lines = path.read_text().splitlines()
    except OSError as error:
        raise BenchError(f"--prompts: can not read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise BenchError(f"--prompts: {path} is not UTF-8: {error}") from error
    found: list[FilePrompt] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            where = f"--prompts: {path}, line {number}"
            is_json = path.suffix == ".jsonl"
            found.append(_parse(line, where, takes_messages) if is_json else FilePrompt(line, None))
    if not 1 <= len(found) <= MAX_PROMPTS:
        raise BenchError(f"--prompts: {path} has {len(found)} prompts, not 1 to {MAX_PROMPTS}")
    return found


def _parse(line: str, where: str, takes_messages: bool) -> FilePrompt:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise BenchError(f"{where}: no JSON: {error}") from error
    if not isinstance(entry, dict) or ("prompt" in entry) == ("messages" in entry):
        raise BenchError(f"{where}: must be an object with either `prompt` or `messages`")
    max_tokens = entry.get("max_tokens")
    if max_tokens is not None and not (type(max_tokens) is int and 1 <= max_tokens <= MAX_TOKENS):
        raise BenchError(f"{where}: max_tokens {max_tokens!r} is not 1 to {MAX_TOKENS}")
    if "prompt" in entry:
        if not isinstance(entry["prompt"], str) or not entry["prompt"]:
            raise BenchError(f"{where}: prompt {str(entry['prompt'])[:60]!r} is no text")
        return FilePrompt(entry["prompt"], max_tokens)
    messages = entry["messages"]
    if not takes_messages:
        raise BenchError(f"{where}: messages need --endpoint chat")
    if not isinstance(messages, list) or not messages or not all(map(_is_object, messages)):
        raise BenchError(f"{where}: messages must be a list of objects, at least one")
    return FilePrompt(messages, max_tokens)


def _is_object(value: object) -> bool:
    return isinstance(value, dict)
