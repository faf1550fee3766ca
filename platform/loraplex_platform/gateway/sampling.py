"""From a request's fields to the engine's `SamplingParams`, with everything checked that the model bounds.

Ranges that hold for every model are in the schemas; what depends on the vocabulary or on two fields at
once is here. The engine checks all of it again: it trusts no gateway.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from loraplex_engine.protocol import (
    MAX_BAD_WORD_TOKENS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)

from loraplex_platform.gateway.errors import InvalidValueError
from loraplex_platform.gateway.openai_schemas import SamplingFields
from loraplex_platform.gateway.tokenization import BaseTokenizer

_Words = tuple[tuple[int, ...], ...]


async def sampling_params(
    tokenizer: BaseTokenizer, fields: SamplingFields, max_tokens: int, num_logprobs: int | None
) -> SamplingParams:
    """How to draw this request's tokens.

    Raises:
        InvalidValueError: names the field.
    """
    if (fields.min_tokens or 0) > max_tokens:
        raise InvalidValueError(
            f"Invalid value for 'min_tokens': expected at most {max_tokens}, which is 'max_tokens'.",
            param="min_tokens",
        )
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=_or(fields.temperature, 1.0),
        top_p=_or(fields.top_p, 1.0),
        top_k=max(fields.top_k or 0, 0),
        min_p=fields.min_p or 0.0,
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        repetition_penalty=_or(fields.repetition_penalty, 1.0),
        logit_bias=_logit_bias(fields.logit_bias or {}, tokenizer.vocab_size),
        # Without a seed every request gets its own: two replicas must not answer alike by accident.
        seed=secrets.randbits(64) if fields.seed is None else fields.seed % 2**64,
        stop_token_ids=_stop_token_ids(fields, tokenizer),
        ignore_eos=bool(fields.ignore_eos),
        min_tokens=fields.min_tokens or 0,
        bad_words_token_ids=await _bad_words(fields.bad_words or [], tokenizer),
        allowed_token_ids=_ids("allowed_token_ids", fields.allowed_token_ids, tokenizer.vocab_size),
        n=fields.n or 1,
        logprobs=num_logprobs,
    )


def check_ids(param: str, ids: Sequence[int], vocab_size: int) -> None:
    """Raise `InvalidValueError` for the first that is no id of the vocabulary."""
    for position, token_id in enumerate(ids):
        if not 0 <= token_id < vocab_size:
            name = f"{param}[{position}]"
            raise InvalidValueError(
                f"Invalid value for '{name}': token ids go from 0 to {vocab_size - 1}.", param=name
            )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _ids(param: str, ids: Sequence[int] | None, vocab_size: int) -> tuple[int, ...]:
    check_ids(param, ids or (), vocab_size)
    return tuple(dict.fromkeys(ids or ()))


def _stop_token_ids(fields: SamplingFields, tokenizer: BaseTokenizer) -> tuple[int, ...]:
    own = () if fields.ignore_eos else tokenizer.end_token_ids
    asked = _ids("stop_token_ids", fields.stop_token_ids, tokenizer.vocab_size)
    ids = tuple(dict.fromkeys((*own, *asked)))
    if len(ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidValueError(
            "Invalid value for 'stop_token_ids': expected at most"
            f" {MAX_STOP_TOKEN_IDS - len(own)} ids besides the model's own.",
            param="stop_token_ids",
        )
    return ids


def _logit_bias(biases: dict[str, float], vocab_size: int) -> dict[int, float]:
    by_id: dict[int, float] = {}
    for key, bias in biases.items():
        # Not int(): it also takes " 7", "7_0" and the digits of other scripts.
        is_number = key.isascii() and key.isdigit() and len(key) < 10
        if not (is_number and key == str(int(key)) and int(key) < vocab_size):
            raise InvalidValueError(
                "Invalid value for 'logit_bias': its keys are token ids from 0 to"
                f" {vocab_size - 1}, written as strings.",
                param="logit_bias",
            )
        by_id[int(key)] = bias
    return by_id


async def _bad_words(words: Sequence[str], tokenizer: BaseTokenizer) -> _Words:
    """Each word as the tokenizer writes it at the start of a text, and after a space."""
    if not words:
        return ()
    bare = [word.lstrip(" ") or word for word in words]
    variants = [text for word in bare for text in (word, f" {word}")]
    sequences = await tokenizer.encode_plain(variants)
    for position, ids in enumerate(sequences):
        if not 1 <= len(ids) <= MAX_BAD_WORD_TOKENS:
            name = f"bad_words[{position // 2}]"
            raise InvalidValueError(
                f"Invalid value for '{name}': expected between 1 and {MAX_BAD_WORD_TOKENS} tokens.",
                param=name,
            )
    return tuple(dict.fromkeys(tuple(ids) for ids in sequences))
