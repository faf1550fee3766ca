"""What a request must look like to be queued; everything else is refused before any work is done.

Checks values, not types: frames were typed when they were decoded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from loraplex_engine.errors import InvalidRequestError, NeverFitsError
from loraplex_engine.protocol import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_CHOICES,
    MAX_GRAMMAR_CHARS,
    MAX_LOGIT_BIASES,
    MAX_LOGPROBS,
    MAX_STOP_TOKEN_IDS,
    MAX_WEIGHT,
    MIN_WEIGHT,
    Generate,
    SamplingParams,
    is_adapter_digest,
)

_INT32_MAX = 2**31 - 1
MAX_TEMPERATURE = 100.0  # all but uniform; the arithmetic is in float32
MAX_PENALTY = 2.0  # presence and frequency; OpenAI's range
MAX_LOGIT_BIAS = 100.0  # OpenAI's range
# Beyond these a penalty is a ban or a certainty, which allowed and bad words say better.
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0
MAX_ID_CHARS = 64  # a UUID has 36; ids go into the journal, whose records are bounded


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What the base model bounds."""

    vocab_size: int  # ids 0 .. vocab_size - 1 have an embedding
    eos_token_ids: frozenset[int]
    max_model_len: int  # longest prompt plus output, in tokens


def check_request(
    generate: Generate, limits: ModelLimits, num_kv_slots: int, max_waiting: int
) -> None:
    """Refuse what cannot run.

    Prompt plus max_tokens within the bound means that a request's context never ends before its
    max_tokens, and that alone it always has room.

    Args:
        num_kv_slots: tokens that the whole KV cache holds.
        max_waiting: requests that the whole queue holds; each of n choices takes a place.

    Raises:
        InvalidRequestError: a value is out of range; the message names the field.
        NeverFitsError: prompt plus max_tokens is beyond the context or the whole KV cache.
    """
    prompt = generate.prompt_token_ids
    if not generate.request_id:
        raise InvalidRequestError("request_id is empty")
    for field, value in (("request_id", generate.request_id), ("tenant_id", generate.tenant_id)):
        if len(value) > MAX_ID_CHARS:
            raise InvalidRequestError(
                f"{field} has {len(value)} characters: at most {MAX_ID_CHARS}"
            )
    if not prompt:
        raise InvalidRequestError("prompt_token_ids is empty: a prompt has at least one token")
    _check_ids("prompt_token_ids", min(prompt), max(prompt), limits.vocab_size)
    _check_sampling(generate.sampling, limits.vocab_size)
    if generate.sampling.n > max_waiting:
        raise InvalidRequestError(
            f"n is {generate.sampling.n}: this replica queues at most {max_waiting} choices"
        )
    digest = generate.adapter_digest
    # It becomes a path in the adapter store.
    if digest is not None and not is_adapter_digest(digest):
        raise InvalidRequestError("adapter_digest is not 'sha256:' and 64 lower-case hex digits")
    if abs(generate.priority) > _INT32_MAX:
        raise InvalidRequestError(f"priority is {generate.priority}: it must fit 32 bits")
    _check_number("weight", generate.weight, MIN_WEIGHT, MAX_WEIGHT)
    if generate.memory_weight is not None:
        _check_number("memory_weight", generate.memory_weight, MIN_WEIGHT, MAX_WEIGHT)
    if generate.max_adapters is not None and generate.max_adapters < 1:
        raise InvalidRequestError(f"max_adapters is {generate.max_adapters}: use 1 or more")
    if generate.deadline_unix_s is not None and not math.isfinite(generate.deadline_unix_s):
        raise InvalidRequestError("deadline_unix_s is not a finite number")
    wanted = len(prompt) + generate.sampling.max_tokens
    bound = min(limits.max_model_len, num_kv_slots)
    if wanted > bound:
        raise NeverFitsError(
            f"the prompt has {len(prompt)} tokens and max_tokens is {generate.sampling.max_tokens}: "
            f"{wanted} in all, but this replica holds {bound} tokens per request"
        )


def _check_sampling(sampling: SamplingParams, vocab_size: int) -> None:
    if sampling.max_tokens < 1:
        raise InvalidRequestError(f"max_tokens is {sampling.max_tokens}: it must be at least 1")
    for field, value, lowest, highest in (
        ("temperature", sampling.temperature, 0.0, MAX_TEMPERATURE),
        ("min_p", sampling.min_p, 0.0, 1.0),
        ("presence_penalty", sampling.presence_penalty, -MAX_PENALTY, MAX_PENALTY),
        ("frequency_penalty", sampling.frequency_penalty, -MAX_PENALTY, MAX_PENALTY),
        (
            "repetition_penalty",
            sampling.repetition_penalty,
            MIN_REPETITION_PENALTY,
            MAX_REPETITION_PENALTY,
        ),
    ):
        _check_number(field, value, lowest, highest)
    if not 0 < sampling.top_p <= 1:
        raise InvalidRequestError(f"top_p is {sampling.top_p}: it must be above 0 and at most 1")
    if not 0 <= sampling.top_k <= _INT32_MAX:
        raise InvalidRequestError(f"top_k is {sampling.top_k}: it must be 0 (off) or more")
    if not 0 <= sampling.seed < 2**64:
        raise InvalidRequestError(f"seed is {sampling.seed}: it must be an unsigned 64-bit number")
    if not 1 <= sampling.n <= MAX_CHOICES:
        raise InvalidRequestError(f"n is {sampling.n}: it must be between 1 and {MAX_CHOICES}")
    if not 0 <= sampling.min_tokens <= sampling.max_tokens:
        raise InvalidRequestError(
            f"min_tokens is {sampling.min_tokens}: it must be between 0 and max_tokens,"
            f" {sampling.max_tokens}"
        )
    if sampling.logprobs is not None and not 0 <= sampling.logprobs <= MAX_LOGPROBS:
        raise InvalidRequestError(
            f"logprobs is {sampling.logprobs}: it must be between 0 and {MAX_LOGPROBS}"
        )
    grammar = sampling.grammar
    if grammar is not None and len(grammar.value) > MAX_GRAMMAR_CHARS:
        raise InvalidRequestError(
            f"grammar has {len(grammar.value)} characters: at most {MAX_GRAMMAR_CHARS}"
        )
    _check_id_lists(sampling, vocab_size)


def _check_id_lists(sampling: SamplingParams, vocab_size: int) -> None:
    for field, size, most in (
        ("stop_token_ids", len(sampling.stop_token_ids), MAX_STOP_TOKEN_IDS),
        ("allowed_token_ids", len(sampling.allowed_token_ids), vocab_size),
        ("logit_bias", len(sampling.logit_bias), MAX_LOGIT_BIASES),
        ("bad_words_token_ids", len(sampling.bad_words_token_ids), MAX_BAD_WORDS),
    ):
        if size > most:
            raise InvalidRequestError(f"{field} has {size} entries: at most {most}")
    for word in sampling.bad_words_token_ids:
        if not 1 <= len(word) <= MAX_BAD_WORD_TOKENS:
            raise InvalidRequestError(
                f"bad_words_token_ids holds a sequence of {len(word)} tokens: between 1 and"
                f" {MAX_BAD_WORD_TOKENS}"
            )
    for field, ids in (
        ("stop_token_ids", sampling.stop_token_ids),
        ("allowed_token_ids", sampling.allowed_token_ids),
        ("logit_bias", tuple(sampling.logit_bias)),
        *(("bad_words_token_ids", word) for word in sampling.bad_words_token_ids),
    ):
        if ids:
            _check_ids(field, min(ids), max(ids), vocab_size)
    for bias in sampling.logit_bias.values():
        _check_number("logit_bias", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)


def _check_number(field: str, value: float, lowest: float, highest: float) -> None:
    """NaN is in no range, infinity in none either."""
    if not (math.isfinite(value) and lowest <= value <= highest):
        raise InvalidRequestError(
            f"{field} is {value}: it must be finite and between {lowest:g} and {highest:g}"
        )


def _check_ids(field: str, lowest: int, highest: int, vocab_size: int) -> None:
    if lowest < 0 or highest >= vocab_size:
        bad = lowest if lowest < 0 else highest
        raise InvalidRequestError(
            f"{field} holds {bad}: ids of this model are 0 to {vocab_size - 1}"
        )
