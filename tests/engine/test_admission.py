"""Admission: every value out of range is refused with its field's name; what can never fit, with both
numbers."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from loraplex_engine.admission import ModelLimits, check_request
from loraplex_engine.errors import InvalidRequestError, NeverFitsError
from loraplex_engine.protocol import Grammar

from tests.support.engine_fakes import EOS, VOCAB_SIZE, digest, make_request

LIMITS = ModelLimits(vocab_size=VOCAB_SIZE, eos_token_ids=frozenset({EOS}), max_model_len=64)


def check(
    num_kv_slots: int = 1_000,
    sampling: dict[str, Any] | None = None,
    max_waiting: int = 100,
    **fields: Any,
) -> None:
    request = make_request()
    if sampling is not None:
        fields["sampling"] = msgspec.structs.replace(request.sampling, **sampling)
    check_request(msgspec.structs.replace(request, **fields), LIMITS, num_kv_slots, max_waiting)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"request_id": ""}, "request_id is empty"),
        ({"request_id": "r" * 65}, "request_id has 65 characters: at most 64"),
        ({"tenant_id": "t" * 65}, "tenant_id has 65 characters: at most 64"),
        ({"prompt_token_ids": []}, "prompt_token_ids is empty"),
        ({"prompt_token_ids": [1, VOCAB_SIZE]}, "prompt_token_ids holds 97: .* 0 to 96"),
        ({"prompt_token_ids": [1, -1]}, "prompt_token_ids holds -1"),
        ({"prompt_token_ids": [2**63]}, "prompt_token_ids holds 9223372036854775808"),
        ({"adapter_digest": "sha256:../../etc/passwd"}, "adapter_digest"),
        ({"adapter_digest": digest("a") + "\n"}, "adapter_digest"),
        ({"priority": 2**40}, "priority is"),
        ({"weight": 0.0}, "weight is 0.0"),
        ({"weight": float("inf")}, "weight is inf"),
        ({"weight": 5e-324}, "weight is 5e-324: .* between 0.001 and 1000"),
        ({"weight": 1000.1}, "weight is 1000.1"),
        ({"deadline_unix_s": float("nan")}, "deadline_unix_s"),
    ],
)
def test_a_bad_field_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        check(**fields)


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"forced_token_ids": (1, 2, 3)}, "forced_token_ids has 3 ids: .* max_tokens, 4"),
        ({"forced_token_ids": (1, 2, 3, 97)}, "forced_token_ids holds 97"),
        ({"forced_token_ids": (1, 2, 3, -1)}, "forced_token_ids holds -1"),
        ({"forced_token_ids": (1, 2, 3, 4), "n": 2}, "n is 2: with forced_token_ids"),
        ({"forced_token_ids": (1, 2, 3, 4), "stop_token_ids": (1,)}, "stop_token_ids cannot go"),
        (
            {"forced_token_ids": (1, 2, 3, 4), "grammar": Grammar(kind="regex", value="a")},
            "grammar cannot go",
        ),
    ],
)
def test_what_cannot_go_with_a_told_output_is_refused(
    sampling: dict[str, Any], message: str
) -> None:
    check(sampling={"forced_token_ids": (1, 2, 3, EOS)})
    with pytest.raises(InvalidRequestError, match=message):
        check(sampling=sampling)


def test_more_choices_than_the_queue_holds_are_refused_for_good() -> None:
    check(sampling={"n": 8}, max_waiting=8)
    with pytest.raises(InvalidRequestError, match=r"n is 9: .* at most 8 choices"):
        check(sampling={"n": 9}, max_waiting=8)


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": -5}, "max_tokens is -5"),
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"temperature": 1e300}, r"temperature is 1e\+300: .* between 0 and 100"),
        ({"temperature": 100.1}, "temperature is 100.1"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"top_p": float("nan")}, "top_p is nan"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_k": 2**31}, "top_k is 2147483648"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**64}, "seed is"),
        ({"stop_token_ids": (1,) * 65}, "stop_token_ids has 65 entries: at most 64"),
        ({"stop_token_ids": (VOCAB_SIZE,)}, "stop_token_ids holds 97"),
        ({"stop_token_ids": (-2,)}, "stop_token_ids holds -2"),
        ({"min_p": -0.1}, "min_p is -0.1"),
        ({"min_p": 1.5}, "min_p is 1.5: it must be finite and between 0 and 1"),
        ({"min_p": float("nan")}, "min_p is nan"),
        ({"presence_penalty": 2.5}, "presence_penalty is 2.5"),
        ({"presence_penalty": float("nan")}, "presence_penalty is nan"),
        ({"frequency_penalty": -2.1}, "frequency_penalty is -2.1: .* between -2 and 2"),
        ({"frequency_penalty": float("-inf")}, "frequency_penalty is -inf"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0: .* between 0.01 and 100"),
        ({"repetition_penalty": 1e30}, r"repetition_penalty is 1e\+30"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty is nan"),
        ({"logit_bias": {VOCAB_SIZE: 1.0}}, "logit_bias holds 97"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias holds -1"),
        ({"logit_bias": {1: 100.5}}, "logit_bias is 100.5"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias is nan"),
        ({"logit_bias": {1: float("inf")}}, "logit_bias is inf"),
        (
            {"logit_bias": dict.fromkeys(range(1025), 1.0)},
            "logit_bias has 1025 entries: at most 1024",
        ),
        ({"min_tokens": -1}, "min_tokens is -1"),
        ({"min_tokens": 5}, "min_tokens is 5: it must be between 0 and max_tokens, 4"),
        ({"bad_words_token_ids": ((),)}, "bad_words_token_ids holds a sequence of 0 tokens"),
        ({"bad_words_token_ids": ((1,) * 33,)}, "bad_words_token_ids holds a sequence of 33"),
        (
            {"bad_words_token_ids": ((1,),) * 257},
            "bad_words_token_ids has 257 entries: at most 256",
        ),
        ({"bad_words_token_ids": ((1,), (2, VOCAB_SIZE))}, "bad_words_token_ids holds 97"),
        ({"bad_words_token_ids": ((-3, 2),)}, "bad_words_token_ids holds -3"),
        ({"allowed_token_ids": (1, VOCAB_SIZE)}, "allowed_token_ids holds 97"),
        ({"allowed_token_ids": (-1,)}, "allowed_token_ids holds -1"),
        ({"allowed_token_ids": (1,) * 98}, "allowed_token_ids has 98 entries: at most 97"),
        ({"n": 0}, "n is 0: it must be between 1 and 16"),
        ({"n": 17}, "n is 17"),
        (
            {"grammar": Grammar(kind="regex", value="a" * (256 * 1024 + 1))},
            "grammar has 262145 characters: at most 262144",
        ),
        ({"logprobs": -1}, "logprobs is -1"),
        ({"logprobs": 21}, "logprobs is 21: it must be between 0 and 20"),
    ],
)
def test_bad_sampling_is_refused_by_name(sampling: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        check(sampling=sampling)


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"top_p": 1e-6, "top_k": 2**31 - 1, "seed": 2**64 - 1},
        {"logprobs": 0},
        {"logprobs": 20, "stop_token_ids": tuple(range(64))},
        {"max_tokens": 61},
        {"min_tokens": 4, "n": 16, "min_p": 1.0, "allowed_token_ids": tuple(range(VOCAB_SIZE))},
        {"presence_penalty": -2.0, "frequency_penalty": 2.0, "repetition_penalty": 0.01},
        {"logit_bias": {0: -100.0, VOCAB_SIZE - 1: 100.0}, "repetition_penalty": 100.0},
        {"bad_words_token_ids": ((1,) * 32,) * 256},
    ],
)
def test_the_edges_of_the_ranges_are_accepted(sampling: dict[str, Any]) -> None:
    check(sampling=sampling)


def test_the_longest_ids_are_accepted() -> None:
    check(request_id="r" * 64, tenant_id="t" * 64)


def test_what_is_beyond_the_context_is_refused_with_both_numbers() -> None:
    with pytest.raises(NeverFitsError, match=r"65 in all, .* holds 64 tokens"):
        check(sampling={"max_tokens": 62})


def test_what_is_beyond_the_whole_kv_cache_is_refused_with_both_numbers() -> None:
    with pytest.raises(NeverFitsError, match=r"13 in all, .* holds 12 tokens"):
        check(num_kv_slots=12, sampling={"max_tokens": 10})
