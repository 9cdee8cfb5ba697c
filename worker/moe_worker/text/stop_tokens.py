"""Which tokens end an answer: every one that the model's files name as its end.

Instruction-tuned models often end a turn with another token than `config.json` says; the newer
`generation_config.json` lists all of them, and the tokenizer names the one its template writes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from moe_worker.model.config import ModelUnreadable
from moe_worker.text.chat_template import read_tokenizer_config, special_tokens


def stop_token_ids(
    model_path: Path, config_ids: frozenset[int], tokenizer: Tokenizer
) -> frozenset[int]:
    """`config_ids` (of config.json) and what generation_config.json and the tokenizer add.

    Raises:
        ModelUnreadable: generation_config.json holds something else than token ids.
    """
    end_of_turn = special_tokens(read_tokenizer_config(model_path)).get("eos_token")
    token_id = None if end_of_turn is None else tokenizer.token_to_id(end_of_turn)
    of_tokenizer = frozenset() if token_id is None else frozenset({token_id})
    return config_ids | _generation_ids(model_path / "generation_config.json") | of_tokenizer


def _generation_ids(path: Path) -> frozenset[int]:
    if not path.is_file():
        return frozenset()
    try:
        value: Any = json.loads(path.read_text()).get("eos_token_id")
    except (ValueError, AttributeError, RecursionError) as error:
        raise ModelUnreadable(f"{path} is not a JSON object: {error}") from error
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token) is int for token in ids):
        raise ModelUnreadable(f"{path}: eos_token_id must be one or more token ids, got {value!r}")
    return frozenset(ids)
