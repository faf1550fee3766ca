"""OpenAI's shapes for chat completions, completions and models, as msgspec structs.

Requests hold only what we serve; `request_parsing.py` refuses the rest by name before it gets here.
Responses keep OpenAI's key order and its difference between `null` and absent (`UNSET`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from loraplex_engine import protocol
from loraplex_engine.protocol import (
    MAX_CHOICES,
    MAX_LOGIT_BIASES,
    MAX_LOGPROBS,
    MAX_STOP_TOKEN_IDS,
)
from msgspec import UNSET, Meta, Struct, UnsetType

from loraplex_platform.gateway.structured_schemas import (
    MAX_TOOL_CALLS,
    MAX_TOOLS,
    CalledTool,
    CallId,
    ResponseFormat,
    StructuredOutputs,
    Tool,
    ToolChoice,
)

MAX_STOPS = 4
MAX_STOP_CHARS = 256
MAX_COMPLETION_LOGPROBS = 5
MAX_ALLOWED_TOKEN_IDS = 2**18  # no vocabulary that we serve has more
MAX_MESSAGES = 2**14
MAX_SUBJECT_CHARS = 512  # OpenAI's bound on a value of `metadata`
MAX_CONTENT_PARTS = 2**12
MAX_BAD_WORDS = protocol.MAX_BAD_WORDS // 2  # each is banned with and without a space before it

Temperature = Annotated[float, Meta(ge=0, le=2, description="0 is greedy.")]
TopP = Annotated[float, Meta(gt=0, le=1)]
TopK = Annotated[int, Meta(ge=-1, le=2**31 - 1, description="Extra: 0 and -1 switch it off.")]
MinP = Annotated[
    float,
    Meta(
        ge=0,
        le=1,
        description="Extra: tokens less likely than this times the most likely one are dropped.",
    ),
]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
RepetitionPenalty = Annotated[
    float,
    Meta(ge=0.01, le=100, description="Extra: over prompt and output; 1 switches it off."),
]
_Bias = Annotated[float, Meta(ge=-100, le=100)]
_LogitBias = Annotated[
    dict[str, _Bias],
    Meta(max_length=MAX_LOGIT_BIASES, description="By token id, written as a string."),
]
_MinTokens = Annotated[
    int, Meta(ge=0, le=2**31 - 1, description="Extra: nothing stops before so many tokens.")
]
_TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_StopTokenIds = Annotated[
    list[_TokenId],
    Meta(max_length=MAX_STOP_TOKEN_IDS, description="Extra: tokens that end the answer."),
]
_AllowedTokenIds = Annotated[
    list[_TokenId],
    Meta(
        min_length=1,
        max_length=MAX_ALLOWED_TOKEN_IDS,
        description="Extra: no other token is sampled.",
    ),
]
_BadWords = Annotated[
    list[Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]],
    Meta(
        max_length=MAX_BAD_WORDS,
        description="Extra: never sampled, as the tokenizer writes them with and without a space.",
    ),
]
_N = Annotated[int, Meta(ge=1, le=MAX_CHOICES, description="Choices, each of its own draw.")]
_Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
MaxTokens = Annotated[int, Meta(ge=1, le=2**31 - 1)]
StopText = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
_SubjectText = Annotated[str, Meta(max_length=MAX_SUBJECT_CHARS)]
_User = Annotated[
    _SubjectText,
    Meta(
        description="Who asks. In a rollout that goes by user, a user's answers come from one side."
    ),
]
_SafetyIdentifier = Annotated[
    _SubjectText,
    Meta(description="OpenAI's newer name of `user`; where both are sent, this counts."),
]
_Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], _SubjectText],
    Meta(
        max_length=16,
        description="`conversation_id` names the conversation. In a rollout that goes by conversation, all"
        " requests of one get their answers from one side; without it the first user message and the first"
        " system message before it tell conversations apart. Nothing else is read, and nothing is kept.",
    ),
]
_Stop = StopText | Annotated[list[StopText], Meta(max_length=MAX_STOPS)]
_Model = Annotated[str, Meta(min_length=1, max_length=256)]

# ---------------------------------------------------------------------------- requests


class StreamOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Only together with `stream: true`."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # true is refused


class ContentPart(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of a message; only `text` is served."""

    type: str
    text: str | None = None


class Message(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One turn. What follows `content` is there because clients send our own answers back."""

    role: str
    name: Annotated[str, Meta(max_length=64)] | None = None  # for templates that know it
    content: str | Annotated[list[ContentPart], Meta(max_length=MAX_CONTENT_PARTS)] | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: Any = None
    function_call: Any = None
    tool_calls: Annotated[list[CalledTool], Meta(max_length=MAX_TOOL_CALLS)] | None = None
    tool_call_id: CallId | None = None  # of role "tool": the call that this is the result of


class SamplingFields(Struct, frozen=True, kw_only=True):
    """What both endpoints take: OpenAI's names, and vLLM's for what OpenAI lacks ("Extra")."""

    model: _Model
    max_tokens: MaxTokens | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    n: _N | None = None
    seed: _Seed | None = None
    stop: _Stop | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: _LogitBias | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    min_tokens: _MinTokens | None = None
    stop_token_ids: _StopTokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    bad_words: _BadWords | None = None
    allowed_token_ids: _AllowedTokenIds | None = None
    structured_outputs: StructuredOutputs | None = None
    user: _User | None = None


class ChatRequest(SamplingFields, frozen=True, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    metadata: _Metadata | None = None
    safety_identifier: _SafetyIdentifier | None = None


class CompletionRequest(SamplingFields, frozen=True, kw_only=True):
    """`POST /v1/completions`. `prompt` is checked by `request_parsing.py`."""

    prompt: Any
    logprobs: Annotated[int, Meta(ge=0, le=MAX_COMPLETION_LOGPROBS)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None  # only as large as n


# ---------------------------------------------------------------------------- responses


class PromptTokensDetails(Struct, frozen=True):
    """`cached_tokens`: served from this tenant's own prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(Struct, frozen=True):
    """Always zero: no model here hides its reasoning."""

    reasoning_tokens: int = 0


class UsageReport(Struct, frozen=True, kw_only=True):
    """What is billed."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails

    @classmethod
    def of(cls, prompt: int, completion: int, cached: int) -> UsageReport:
        """From token counts."""
        return cls(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptTokensDetails(cached),
            completion_tokens_details=CompletionTokensDetails(),
        )


FinishReasonText = Literal["stop", "length"]
ChatFinishReason = Literal["stop", "length", "tool_calls"]


class TopLogprob(Struct, frozen=True):
    """One alternative at a position."""

    token: str
    logprob: float
    bytes: list[int] | None


class ContentLogprob(Struct, frozen=True):
    """The token at a position, and its alternatives."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, frozen=True):
    """Logprobs of a chat choice."""

    content: list[ContentLogprob]
    refusal: None = None


class CompletionLogprobs(Struct, frozen=True):
    """Logprobs of a completions choice: parallel lists."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class FunctionCall(Struct, frozen=True, kw_only=True):
    """`arguments`: JSON, as the model wrote it; cut off where the answer is."""

    name: str
    arguments: str


class ToolCall(Struct, frozen=True, kw_only=True):
    """A call that the model wants made."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class AssistantMessage(Struct, frozen=True, kw_only=True):
    """The answer. `content` is null where it is nothing but calls."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    tool_calls: list[ToolCall] | UnsetType = UNSET
    refusal: None = None


class ChatChoice(Struct, frozen=True, kw_only=True):
    """One of n."""

    index: int = 0
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason


class ChatCompletion(Struct, frozen=True, kw_only=True):
    """The whole answer."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageReport
    system_fingerprint: str


class FunctionCallDelta(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The name comes once, then only arguments."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCallDelta(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a chunk adds to call number `index`; `id` and `type` come with the name."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionCallDelta


class Delta(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a chunk adds."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChunkChoice(Struct, frozen=True, kw_only=True):
    """The choice that a chunk adds to."""

    index: int = 0
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinishReason | None = None


class ChatCompletionChunk(Struct, frozen=True, kw_only=True):
    """One frame of a chat stream. `usage` is absent unless the client asked for it."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    usage: UsageReport | UnsetType | None = UNSET


class CompletionChoice(Struct, frozen=True, kw_only=True):
    """One of n, whole or in a frame."""

    index: int = 0
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReasonText | None = None


class Completion(Struct, frozen=True, kw_only=True):
    """The whole answer, or one frame of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: UsageReport | UnsetType | None = UNSET


class Model(Struct, frozen=True, kw_only=True):
    """A model id that the key may call."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str


class ModelList(Struct, frozen=True, kw_only=True):
    """All of them."""

    object: Literal["list"] = "list"
    data: list[Model]


encode_json = msgspec.json.Encoder().encode
