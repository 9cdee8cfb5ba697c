"""Text with a wanted number of tokens, for a tokenizer that is not known: random words, counted in
tokens by what the server says about two prompts.

Neighbour: `prompts` makes requests of it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

WORDS = (
    "the of and to in is it you that he was for on are with as his they be at one have this from "
    "or had by hot but some what there we can out other were all your when up use word how said "
    "an each she which do their time if will way about many then them would write like so these "
    "her long make thing see him two has look more day could go come did my sound no most number "
    "who over know water than call first people may down side been now find any new work part "
).split()


@dataclass(frozen=True)
class WordTokens:
    """A prompt of w words has about `overhead + w × per_word` tokens."""

    per_word: float = 1.0
    overhead: float = 0.0
    """What the server adds, a chat template for instance."""

    def words_for(self, num_tokens: int) -> int:
        """At least 1."""
        return max(1, round((num_tokens - self.overhead) / self.per_word))

    def words_within(self, num_tokens: int) -> int:
        """Words that are so many tokens of a longer prompt."""
        return round(num_tokens / self.per_word)


def fitted(small: tuple[int, int], large: tuple[int, int]) -> WordTokens:
    """Through two prompts, each (words, tokens). What can not be makes a word a token."""
    words = large[0] - small[0]
    tokens = large[1] - small[1]
    if words <= 0 or tokens <= 0:
        return WordTokens()
    per_word = tokens / words
    return WordTokens(per_word, max(0.0, small[1] - small[0] * per_word))


def text_of(num_words: int, random_source: random.Random) -> str:
    return " ".join(random_source.choices(WORDS, k=num_words))
