"""From a checked body to what an engine is asked under one revision: prompt, sampling, stop strings.

Another revision of the same deployment may have another system prompt and other defaults, so that what a
rollout asks of its other side is prepared anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec
from loraplex_engine.protocol import SamplingParams

from loraplex_platform.gateway.chat_message import ChatMessage
from loraplex_platform.gateway.errors import ContextLengthError, InvalidValueError
from loraplex_platform.gateway.job import Prepared
from loraplex_platform.gateway.openai_schemas import ChatRequest, CompletionRequest
from loraplex_platform.gateway.sampling import check_ids, sampling_params
from loraplex_platform.gateway.structure import Structure
from loraplex_platform.gateway.tokenization import BaseTokenizer, too_long

if TYPE_CHECKING:
    from loraplex_platform.gateway.queries import ServedModel
    from loraplex_platform.gateway.routing import Router

MAX_LOGPROB_VALUES = 2**18  # in one answer
_DEFAULT_COMPLETION_TOKENS: Final = 16  # OpenAI's own default for completions


@dataclass(frozen=True, slots=True)
class Preparer:
    """Prepares requests of one base model. `default_max_tokens`: of chats."""

    router: Router
    tokenizer: BaseTokenizer
    default_max_tokens: int

    async def chat(
        self,
        model: ServedModel,
        body: ChatRequest,
        messages: list[ChatMessage],
        structure: Structure,
    ) -> Prepared:
        """A conversation; raises an `InvalidRequestError` that names the field."""
        params = model.revision.params
        body = params.fill(body)
        context_length = self._context_length(model)
        tools = structure.tools
        prompt_ids = await self.tokenizer.encode_chat(
            params.begin(messages), context_length, tools.shown if tools else ()
        )
        _check_prompt(prompt_ids, context_length, "messages")
        name = max_tokens_field(body)
        num_left = context_length - len(prompt_ids)
        default = params.sampling.max_tokens or self.default_max_tokens
        max_tokens = body.max_completion_tokens or body.max_tokens or min(num_left, default)
        _check_max_tokens(max_tokens, len(prompt_ids), context_length, name)
        num_top = num_top_logprobs(body)
        _check_logprobs(body, max_tokens, num_top, "top_logprobs")
        sampling = await sampling_params(self.tokenizer, body, max_tokens, num_top)
        return _prepared(prompt_ids, sampling, body, structure)

    async def completion(
        self, model: ServedModel, body: CompletionRequest, structure: Structure
    ) -> Prepared:
        """A raw prompt, before which no system prompt goes; raises as `chat` does."""
        params = model.revision.params
        body = params.fill(body)
        context_length = self._context_length(model)
        if isinstance(body.prompt, str):
            prompt_ids = await self.tokenizer.encode_prompt(body.prompt, context_length)
            _check_prompt(prompt_ids, context_length, "prompt")
        else:
            prompt_ids = body.prompt
            _check_prompt(prompt_ids, context_length, "prompt")
            check_ids("prompt", prompt_ids, self.tokenizer.vocab_size)
        num_left = context_length - len(prompt_ids)
        default = params.sampling.max_tokens or _DEFAULT_COMPLETION_TOKENS
        max_tokens = body.max_tokens or min(num_left, default)
        _check_max_tokens(max_tokens, len(prompt_ids), context_length, "max_tokens")
        _check_logprobs(body, max_tokens, body.logprobs, "logprobs")
        sampling = await sampling_params(self.tokenizer, body, max_tokens, body.logprobs)
        return _prepared(prompt_ids, sampling, body, structure)

    def _context_length(self, model: ServedModel) -> int:
        return self.router.max_model_len(
            model.base_model, self.tokenizer.context_length, model.builds
        )


def max_tokens_field(body: ChatRequest | CompletionRequest) -> str:
    """What the client called it."""
    is_new = isinstance(body, ChatRequest) and body.max_completion_tokens
    return "max_completion_tokens" if is_new else "max_tokens"


def num_top_logprobs(body: ChatRequest | CompletionRequest) -> int | None:
    """How many alternatives are shown of each token; None: not even its own log-probability."""
    if isinstance(body, CompletionRequest):
        return body.logprobs
    return (body.top_logprobs or 0) if body.logprobs else None


def _prepared(
    prompt_ids: list[int],
    sampling: SamplingParams,
    body: ChatRequest | CompletionRequest,
    structure: Structure,
) -> Prepared:
    return Prepared(
        prompt_ids=prompt_ids,
        sampling=msgspec.structs.replace(sampling, grammar=structure.grammar),
        stops=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
    )


def _check_prompt(ids: list[int], context_length: int, param: str) -> None:
    if not ids:
        raise InvalidValueError(f"'{param}' is empty: at least one token is needed.", param=param)
    if len(ids) >= context_length:
        raise too_long(len(ids), context_length, param)


def _check_max_tokens(max_tokens: int, num_prompt: int, context_length: int, param: str) -> None:
    if num_prompt + max_tokens > context_length:
        raise ContextLengthError(
            f"This model's maximum context length is {context_length} tokens, but the prompt has"
            f" {num_prompt} tokens and '{param}' asks for {max_tokens}: {num_prompt + max_tokens}"
            f" in all. Ask for at most {context_length - num_prompt}.",
            param=param,
        )


def _check_logprobs(
    body: ChatRequest | CompletionRequest, max_tokens: int, num_top: int | None, param: str
) -> None:
    """Bound what an answer holds, and what waits here for a client that reads slowly."""
    if num_top is None:
        return
    num_choices = body.n or 1
    num_wanted = num_choices * max_tokens * (num_top + 1)
    if num_wanted > MAX_LOGPROB_VALUES:
        raise InvalidValueError(
            f"Invalid value for '{param}': {num_choices} choices of up to {max_tokens} tokens with"
            f" {num_top + 1} log-probabilities each are {num_wanted} values, more than"
            f" {MAX_LOGPROB_VALUES}. Ask for fewer, or for fewer tokens or choices.",
            param=param,
        )
