"""Our numbers against `transformers`, float32 weights and fp32 KV: logits within 1e-4, same text.

The text is compared by induction: transformers sees the prompt and all tokens that came out, and at
each position its own greedy choice must be the next of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from tests.support.models import load_with_transformers, save_random_mixtral
from tests.support.one_rank import OneRank

pytestmark = pytest.mark.usefixtures("implementation")
TINY_MODEL = Path(__file__).parents[3] / "examples" / "tiny-moe"
NUM_TOKENS = 64
TEXTS = (
    "def read(path: str) -> list[str]:\n    with open(path) as file:\n",
    "The people of the town",
    "import",
)


def assert_parity(path: Path, prompts: Sequence[Sequence[int]]) -> None:
    traces = OneRank.load(path, "float32").generate(
        prompts, max_tokens=NUM_TOKENS, kv_dtype="fp32", max_batched_tokens=48
    )
    reference = load_with_transformers(path)
    for prompt, trace in zip(prompts, traces, strict=True):
        assert len(trace.tokens) == NUM_TOKENS
        with torch.no_grad():
            logits = reference(torch.tensor([[*prompt, *trace.tokens]])).logits[0]
        expected = logits[len(prompt) - 1 : -1]
        torch.testing.assert_close(torch.stack(trace.logits), expected, rtol=0, atol=1e-4)
        assert expected.argmax(dim=-1).tolist() == trace.tokens


@pytest.mark.parametrize("top_k", [2, 4])
def test_random_mixtral_matches_transformers(tmp_path: Path, top_k: int) -> None:
    path = save_random_mixtral(tmp_path, seed=top_k, top_k=top_k, tie_embeddings=top_k == 2)
    generator = torch.Generator().manual_seed(top_k)
    prompts = [torch.randint(0, 256, (n,), generator=generator).tolist() for n in (1, 30, 100)]
    assert_parity(path, prompts)


def test_tiny_model_matches_transformers() -> None:
    tokenizer = Tokenizer.from_file(str(TINY_MODEL / "tokenizer.json"))
    assert_parity(TINY_MODEL, [tokenizer.encode(text).ids for text in TEXTS])
