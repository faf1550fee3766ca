"""Incremental text equals the library's own decode, for any tokens cut anywhere."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loraplex_platform.gateway.detokenizer import Detokenizer

from tests.platform.gateway import tiny_model

_VOCAB_SIZE = tiny_model.reference().get_vocab_size(with_added_tokens=True)


def _stream(ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tiny_model.base_tokenizer().token_bytes)
    return [*(detokenizer.push(id_) for id_ in ids), detokenizer.flush()]


@given(st.text(max_size=60))
def test_deltas_of_encoded_text_join_to_the_text(text: str) -> None:
    ids = tiny_model.ids_of(text)

    deltas = _stream(ids)

    assert "".join(deltas) == tiny_model.reference().decode(ids, skip_special_tokens=True)


@given(st.lists(st.integers(0, _VOCAB_SIZE - 1), max_size=40))
def test_deltas_of_arbitrary_tokens_join_to_the_full_decode(ids: list[int]) -> None:
    """Random tokens are mostly broken UTF-8, which models do sample."""
    deltas = _stream(ids)

    assert "".join(deltas) == tiny_model.reference().decode(ids, skip_special_tokens=True)


@given(st.lists(st.integers(0, _VOCAB_SIZE - 1), max_size=40))
def test_what_was_shown_is_never_taken_back(ids: list[int]) -> None:
    deltas = _stream(ids)
    full = tiny_model.reference().decode(ids, skip_special_tokens=True)

    for i in range(len(deltas)):
        assert full.startswith("".join(deltas[:i]))


@pytest.mark.parametrize(
    "text", ["안녕하세요 여러분 헬로 쀍", "🙂👩‍👩‍👧 family", "naïve – café", "𝔘𝔫𝔦"]
)
def test_a_character_shows_only_when_it_is_whole(text: str) -> None:
    byte_ids = [tiny_model.reference().token_to_id(token) for token in _byte_tokens(text)]

    deltas = _stream(byte_ids)

    assert "".join(deltas) == text
    assert not any("\ufffd" in delta for delta in deltas)
    assert sum(1 for delta in deltas if delta) == len(text)


def _byte_tokens(text: str) -> list[str]:
    from tokenizers import pre_tokenizers

    [(pieces, _)] = pre_tokenizers.ByteLevel(False, use_regex=False).pre_tokenize_str(text)
    return list(pieces)


def test_an_unfinished_character_is_flushed_as_the_full_decode_shows_it() -> None:
    ids = [tiny_model.reference().token_to_id(token) for token in _byte_tokens("a🙂")][:-1]

    deltas = _stream(ids)

    assert "".join(deltas) == "a\ufffd" == tiny_model.reference().decode(ids)
    assert deltas[-1] == "\ufffd"


def test_special_tokens_add_no_text_and_other_added_tokens_do() -> None:
    ids = tiny_model.ids_of("a<|im_end|>b<think>c")

    assert "".join(_stream(ids)) == "ab<think>c"


def test_part_of_a_character_is_labelled_by_its_bytes() -> None:
    token_bytes = tiny_model.base_tokenizer().token_bytes
    [first, *_] = [tiny_model.reference().token_to_id(token) for token in _byte_tokens("쀍")]

    assert token_bytes.label(first) == "bytes:\\xec"
    assert token_bytes.text_bytes(first) == b"\xec"
