"""Text comes out whole characters at a time, and all of it comes out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from moe_worker.text.detokenizer import Detokenizer
from tests.support.byte_tokenizer import END, byte_tokenizer

TOKENIZER = byte_tokenizer()
ALL_IDS = st.lists(st.integers(0, TOKENIZER.get_vocab_size() - 1), max_size=40)


def pieces_of(ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(TOKENIZER)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


def id_of(text: str) -> int:
    [token_id] = TOKENIZER.encode(text).ids
    return token_id


def test_e06_a_character_of_two_tokens_comes_as_one_piece() -> None:
    ids = TOKENIZER.encode("😀").ids
    assert [TOKENIZER.id_to_token(i) for i in ids] == ["ðŁ", "ĺĢ"]  # F0 9F and 98 80
    assert pieces_of(ids) == ["", "😀", ""]


def test_e06_a_limit_in_mid_character_flushes_one_replacement_mark() -> None:
    ids = TOKENIZER.encode("ok 😀").ids
    assert pieces_of(ids[:-1]) == ["o", "k", " ", "", "\ufffd"]


@given(st.text(max_size=40))
def test_e06_any_text_streams_without_a_replacement_mark(text: str) -> None:
    pieces = pieces_of(TOKENIZER.encode(text).ids)
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


@given(ALL_IDS)
def test_e06_joined_pieces_equal_the_decoded_whole(ids: list[int]) -> None:
    assert "".join(pieces_of(ids)) == TOKENIZER.decode(ids, skip_special_tokens=True)


@given(ALL_IDS)
def test_what_is_sent_is_never_taken_back(ids: list[int]) -> None:
    detokenizer = Detokenizer(TOKENIZER)
    sent = ""
    for count, token_id in enumerate(ids, 1):
        sent += detokenizer.push(token_id)
        assert TOKENIZER.decode(ids[:count]).startswith(sent)


def test_special_tokens_have_no_text_and_cost_no_context() -> None:
    assert pieces_of([id_of("a"), TOKENIZER.token_to_id(END), id_of("b")]) == ["a", "", "b", ""]


def test_a_real_replacement_mark_in_the_text_survives() -> None:
    ids = TOKENIZER.encode("a\ufffdb").ids
    assert "".join(pieces_of(ids)) == "a\ufffdb"


class Spaced:
    """Like SentencePiece: a word's space is lost at the beginning of what is decoded."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return " ".join("abcdefgh"[token] for token in ids)


def test_a_text_that_goes_on_keeps_the_space_before_its_first_word() -> None:
    fresh, going_on = Detokenizer(Spaced()), Detokenizer(Spaced(), before=[0, 1])
    assert fresh.push(2) + fresh.push(3) == "c d"
    assert going_on.push(2) + going_on.push(3) == " c d"


@given(st.text(), st.text())
def test_what_goes_on_from_a_prompt_is_the_rest_of_both(before: str, text: str) -> None:
    prompt, ids = TOKENIZER.encode(before).ids, TOKENIZER.encode(text).ids
    detokenizer = Detokenizer(TOKENIZER, prompt)
    pushed = "".join(detokenizer.push(token) for token in ids) + detokenizer.flush()
    assert pushed == TOKENIZER.decode(ids, skip_special_tokens=True)


def test_a_prompt_that_ends_in_half_a_character_is_no_context() -> None:
    detokenizer = Detokenizer(TOKENIZER, [97, 0xC3])
    assert detokenizer.push(0xA4) + detokenizer.push(98) == "\ufffdb"
