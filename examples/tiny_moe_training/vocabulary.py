"""The byte-level BPE tokenizer with the chat tokens, and its files in the hub's layout.

`chat` renders training conversations with the same tokens as CHAT_TEMPLATE; a test compares them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END, USER, ASSISTANT = "<|end|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = (END, USER, ASSISTANT)  # their ids are 0, 1 and 2
END_ID = 0

# A system message is put before the first user message: the model knows two roles only.
CHAT_TEMPLATE = (
    "{%- set system = messages[0]['content'] + '\\n\\n' "
    "if messages and messages[0]['role'] == 'system' else '' -%}"
    "{%- for message in messages if message['role'] != 'system' -%}"
    "{%- if message['role'] not in ('user', 'assistant') -%}"
    "{{- raise_exception('roles are system (first), user and assistant') -}}"
    "{%- endif -%}"
    "{{- '<|' + message['role'] + '|>\\n' + (system if loop.first else '') + message['content'] "
    "+ '<|end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- endif -%}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE: every text survives encode and decode, whatever its script."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_positions: int) -> None:
    """Writes tokenizer.json and tokenizer_config.json."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END,
        "eos_token": END,
        "pad_token": END,
        "additional_special_tokens": [USER, ASSISTANT],
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_positions,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
