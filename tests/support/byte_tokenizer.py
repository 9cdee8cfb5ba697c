"""A small byte-level tokenizer with chat tokens: one token per byte, and a few that merge bytes."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

END, USER, ASSISTANT = "<|end|>", "<|user|>", "<|assistant|>"
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] not in ('user', 'assistant') -%}"
    "{{- raise_exception('roles are user and assistant') -}}"
    "{%- endif -%}"
    "{{- '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- endif -%}"
)
TOOL_TEMPLATE = (
    "{%- if tools -%}{{- '<|user|>\\n' + tools | tojson + '<tool_call><|end|>\\n' -}}{%- endif -%}"
    "{%- for message in messages -%}"
    "{{- '<|' + ('assistant' if message['role'] == 'assistant' else 'user') + '|>\\n' -}}"
    "{{- message['content'] -}}"
    "{%- for call in message.tool_calls -%}{{- call.function | tojson -}}{%- endfor -%}"
    "{{- '<|end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- endif -%}"
)
"""As of a model that was trained to call tools."""


def letter_of_byte() -> dict[int, str]:
    """GPT-2's printable letter for each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {byte: chr(byte) for byte in printable}
    others = [byte for byte in range(256) if byte not in letters]
    return letters | {byte: chr(256 + index) for index, byte in enumerate(others)}


def byte_tokenizer() -> Tokenizer:
    """Ids 0–255 are the bytes; then merged tokens, F0 9F and 98 80 among them; then chat tokens."""
    letters = letter_of_byte()
    vocabulary = {letters[byte]: byte for byte in range(256)}
    merges = []
    for left, right in ((b"\xf0", b"\x9f"), (b"\x98", b"\x80"), (b"t", b"h"), (b"th", b"e")):
        pair = tuple("".join(letters[byte] for byte in part) for part in (left, right))
        vocabulary["".join(pair)] = len(vocabulary)
        merges.append(pair)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END, USER, ASSISTANT])
    return tokenizer
