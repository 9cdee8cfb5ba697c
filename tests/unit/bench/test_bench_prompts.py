"""Prompts of files and synthetic ones: what is sent, and what is refused."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_worker.bench.bench_error import BenchError
from moe_worker.bench.lengths import Lengths
from moe_worker.bench.prompts import FilePrompt, Prompt, Synthetic, from_file, read_prompts
from moe_worker.bench.words import WordTokens, fitted

FIVE = Lengths(5, 5)


def synthetic(
    wanted: Synthetic, count: int, seed: int, scale: WordTokens | None = None
) -> list[Prompt]:
    prompts = wanted.prompts(
        FIVE, scale or WordTokens(), random.Random(f"{seed}/p"), random.Random(f"{seed}/r")
    )
    return list(itertools.islice(prompts, count))


@given(st.integers(2, 60), st.integers(0, 60), st.integers(0, 2**32), st.data())
def test_synthetic_prompts_have_the_lengths_and_the_beginning_asked_for(
    least: int, spread: int, seed: int, data: st.DataObject
) -> None:
    shared = data.draw(st.integers(0, least - 1))
    wanted = Synthetic(Lengths(least, least + spread), shared)
    prompts = synthetic(wanted, 8, seed)
    words = [str(prompt.content).split() for prompt in prompts]
    assert all(least <= len(of_one) <= least + spread for of_one in words)
    assert len({tuple(of_one[:shared]) for of_one in words}) == 1
    assert prompts == synthetic(wanted, 8, seed)
    assert {prompt.max_tokens for prompt in prompts} == {5}


def test_prompts_differ_beyond_what_they_share() -> None:
    prompts = synthetic(Synthetic(Lengths(40, 40), 20), 50, seed=1)
    assert len({prompt.content for prompt in prompts}) == 50


def test_a_prefix_that_leaves_nothing_is_refused() -> None:
    with pytest.raises(BenchError, match="--shared-prefix-tokens 64 leaves nothing"):
        Synthetic(Lengths(64, 128), 64)


@given(st.floats(0.5, 6.0), st.integers(0, 40), st.integers(30, 2000))
def test_words_are_counted_as_the_server_counts(
    per_word: float, overhead: int, wanted: int
) -> None:
    def tokens(words: int) -> int:
        return overhead + round(words * per_word)

    scale = fitted((16, tokens(16)), (80, tokens(80)))
    words = scale.words_for(wanted)
    assert abs(tokens(words) - wanted) <= max(overhead + per_word - wanted, 0.02 * wanted + 8)


@pytest.mark.parametrize(
    ("small", "large"), [((16, 9), (80, 9)), ((80, 9), (16, 20)), ((1, 9), (2, 3))]
)
def test_counts_that_can_not_be_are_not_believed(
    small: tuple[int, int], large: tuple[int, int]
) -> None:
    assert fitted(small, large) == WordTokens(1.0, 0.0)


def test_a_text_file_has_a_prompt_a_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text('one\n\n{"two": 2}\n')
    prompts = read_prompts(path, takes_messages=False)
    assert prompts == [FilePrompt("one", None), FilePrompt('{"two": 2}', None)]
    sent = list(itertools.islice(from_file(prompts, FIVE, random.Random(0)), 3))
    assert sent == [Prompt("one", 5), Prompt('{"two": 2}', 5), Prompt("one", 5)]


def test_a_jsonl_file_has_texts_or_messages_and_their_own_lengths(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '{"prompt": "one", "max_tokens": 3}\n{"messages": [{"role": "user", "content": "x"}]}\n'
    )
    prompts = read_prompts(path, takes_messages=True)
    sent = list(itertools.islice(from_file(prompts, FIVE, random.Random(0)), 2))
    assert sent == [Prompt("one", 3), Prompt([{"role": "user", "content": "x"}], 5)]
    with pytest.raises(BenchError, match="line 2: messages need --endpoint chat"):
        read_prompts(path, takes_messages=False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n", "has 0 prompts"),
        ("{", "line 1: no JSON"),
        ("[]", "line 1: must be an object"),
        ('{"prompt": "a", "messages": []}', "line 1: must be an object with either"),
        ('\n{"prompt": 5}', "line 2: prompt '5' is no text"),
        ('{"prompt": "a", "max_tokens": true}', "max_tokens True is not 1 to"),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens 0 is not 1 to"),
        ('{"messages": []}', "messages must be a list"),
        ('{"messages": ["a"]}', "messages must be a list of objects"),
    ],
)
def test_a_line_that_can_not_be_sent_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(BenchError, match=message):
        read_prompts(path, takes_messages=True)


def test_a_file_that_can_not_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"missing\.txt: No such file"):
        read_prompts(tmp_path / "missing.txt", takes_messages=True)
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BenchError, match=r"bytes\.txt is not UTF-8"):
        read_prompts(tmp_path / "bytes.txt", takes_messages=True)
