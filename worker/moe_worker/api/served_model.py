"""What of the model the public API needs."""

from __future__ import annotations

from dataclasses import dataclass

from moe_worker.text.chat_template import ChatTemplate
from moe_worker.text.grammar import Grammars
from moe_worker.text.prompt_tokenizer import PromptTokenizer
from moe_worker.text.token_texts import DecodedTexts, TokenTexts


@dataclass(frozen=True)
class ServedModel:
    name: str
    tokenizer: PromptTokenizer
    template: ChatTemplate | None
    vocab_size: int
    stop_token_ids: frozenset[int]
    grammars: Grammars | None = None
    """None: answers of a given form are refused, because its tokens can not be read as bytes."""

    @property
    def texts(self) -> TokenTexts:
        return self.grammars or DecodedTexts(self.tokenizer.decoder)
