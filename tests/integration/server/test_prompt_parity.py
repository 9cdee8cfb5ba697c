"""Prompts of the example model are encoded exactly as `transformers` encodes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moe_worker.text.chat_template import load_template
from moe_worker.text.prompt_tokenizer import PromptTokenizer, load_tokenizer

MODEL = Path(__file__).parents[3] / "examples" / "tiny-moe"
CONVERSATIONS: list[list[tuple[str, str]]] = [
    [("user", "What does os.path.join do?")],
    [("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello!"), ("user", "\tdef f():\n")],
    [("user", "  Grüße, 你好 😀 <|end> |user|> {{ messages }} ")],
]


@pytest.fixture(scope="module")
def reference() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(str(MODEL))


@pytest.mark.parametrize("turns", CONVERSATIONS)
def test_a_chat_is_encoded_as_by_transformers(reference: Any, turns: list[tuple[str, str]]) -> None:
    prompts, template = PromptTokenizer(load_tokenizer(MODEL)), load_template(MODEL)
    assert template is not None
    messages = [{"role": role, "content": content} for role, content in turns]
    rendered = template.render(messages, prompts.shield)
    expected = reference.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert prompts.encode_rendered(rendered) == expected


def test_a_raw_prompt_is_encoded_as_by_transformers(reference: Any) -> None:
    text = "def hello(name):\n    return f'Grüße {name} 😀'"
    prompts = PromptTokenizer(load_tokenizer(MODEL))
    assert prompts.encode_prompt(text) == reference(text)["input_ids"]
    assert prompts.decoder.decode(prompts.encode_prompt(text)) == text
