"""What a request must look like to be queued; everything else is refused before any work is done.

Checks values, not types: frames were typed when they were decoded.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from loraplex_engine.errors import InvalidRequestError, NeverFitsError
from loraplex_engine.protocol import MAX_LOGPROBS, MAX_STOP_TOKEN_IDS, Generate, SamplingParams

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")  # it becomes a path in the adapter store
_INT32_MAX = 2**31 - 1
MAX_ID_CHARS = 64  # a UUID has 36; ids go into the journal, whose records are bounded


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What the base model bounds."""

    vocab_size: int  # ids 0 .. vocab_size - 1 have an embedding
    eos_token_ids: frozenset[int]
    max_model_len: int  # longest prompt plus output, in tokens


def check_request(generate: Generate, limits: ModelLimits, num_kv_slots: int) -> None:
    """Refuse what cannot run.

    Prompt plus max_tokens within the bound means that a request's context never ends before its
    max_tokens, and that alone it always has room.

    Args:
        num_kv_slots: tokens that the whole KV cache holds.

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
    digest = generate.adapter_digest
    if digest is not None and _DIGEST.fullmatch(digest) is None:
        raise InvalidRequestError("adapter_digest is not 'sha256:' and 64 lower-case hex digits")
    if abs(generate.priority) > _INT32_MAX:
        raise InvalidRequestError(f"priority is {generate.priority}: it must fit 32 bits")
    if not (math.isfinite(generate.weight) and generate.weight > 0):
        raise InvalidRequestError(f"weight is {generate.weight}: it must be finite and above 0")
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
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        raise InvalidRequestError(
            f"temperature is {sampling.temperature}: it must be finite and at least 0"
        )
    if not 0 < sampling.top_p <= 1:
        raise InvalidRequestError(f"top_p is {sampling.top_p}: it must be above 0 and at most 1")
    if not 0 <= sampling.top_k <= _INT32_MAX:
        raise InvalidRequestError(f"top_k is {sampling.top_k}: it must be 0 (off) or more")
    if not 0 <= sampling.seed < 2**64:
        raise InvalidRequestError(f"seed is {sampling.seed}: it must be an unsigned 64-bit number")
    if len(sampling.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequestError(
            f"stop_token_ids has {len(sampling.stop_token_ids)} entries: at most {MAX_STOP_TOKEN_IDS}"
        )
    if sampling.stop_token_ids:
        _check_ids(
            "stop_token_ids",
            min(sampling.stop_token_ids),
            max(sampling.stop_token_ids),
            vocab_size,
        )
    if sampling.logprobs is not None and not 0 <= sampling.logprobs <= MAX_LOGPROBS:
        raise InvalidRequestError(
            f"logprobs is {sampling.logprobs}: it must be between 0 and {MAX_LOGPROBS}"
        )


def _check_ids(field: str, lowest: int, highest: int, vocab_size: int) -> None:
    if lowest < 0 or highest >= vocab_size:
        bad = lowest if lowest < 0 else highest
        raise InvalidRequestError(
            f"{field} holds {bad}: ids of this model are 0 to {vocab_size - 1}"
        )
