"""All files that name an end token are heard."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moe_worker.model.config import ModelUnreadable
from moe_worker.text.stop_tokens import stop_token_ids
from tests.support.byte_tokenizer import END, byte_tokenizer

TOKENIZER = byte_tokenizer()
END_ID = TOKENIZER.token_to_id(END)


def found(folder: Path, generation: Any = None, tokenizer: Any = None) -> set[int]:
    for name, content in (
        ("generation_config.json", generation),
        ("tokenizer_config.json", tokenizer),
    ):
        if content is not None:
            (folder / name).write_text(json.dumps(content))
    return set(stop_token_ids(folder, frozenset({7}), TOKENIZER))


def test_the_models_config_is_enough(tmp_path: Path) -> None:
    assert found(tmp_path) == {7}


def test_the_other_files_add_theirs(tmp_path: Path) -> None:
    assert found(tmp_path, {"eos_token_id": 8}) == {7, 8}
    assert found(tmp_path, {"eos_token_id": [8, 9]}, {"eos_token": END}) == {7, 8, 9, END_ID}
    assert found(tmp_path, {}, {"eos_token": "<|unheard|>"}) == {7}


@pytest.mark.parametrize("generation", [{"eos_token_id": "x"}, {"eos_token_id": [1, None]}, [1]])
def test_nonsense_is_refused(tmp_path: Path, generation: Any) -> None:
    with pytest.raises(ModelUnreadable, match=r"generation_config\.json"):
        found(tmp_path, generation)
