"""`POST /v1/chat/completions` and `POST /v1/completions`: check, run, answer.

Everything that can be refused is refused before the request is on the books. Headers wait until the
engine has produced the first token (at most `header_hold_s`), so that early failures are HTTP errors.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, TypeVar

from fastapi import APIRouter, Request, Response
from starlette.requests import ClientDisconnect
from starlette.routing import Match, Route
from starlette.types import Scope

from loraplex_platform.billing.prices import NoPriceError
from loraplex_platform.db.deadline import within
from loraplex_platform.errors import (
    ConflictError,
    EngineUnavailableError,
    IdempotencyReuseError,
    InvalidRequestError,
    PlatformError,
)
from loraplex_platform.gateway import openapi, queries
from loraplex_platform.gateway.admissions import RATES, RateGate
from loraplex_platform.gateway.answers import (
    Answer,
    AnswerHead,
    ChatAnswer,
    CompletionAnswer,
    WholeChoice,
)
from loraplex_platform.gateway.chat_message import ChatMessage
from loraplex_platform.gateway.context import (
    Caller,
    Gateway,
    ThisGateway,
    caller_of,
    find_caller,
    gateway_of,
)
from loraplex_platform.gateway.detokenizer import TokenBytes
from loraplex_platform.gateway.errors import (
    AbandonedError,
    InvalidValueError,
    RequestTimeoutError,
    envelope,
)
from loraplex_platform.gateway.event_stream import DONE, HEADERS, EventStream, frame
from loraplex_platform.gateway.idempotency import MAX_ANSWER_BYTES, Kept, Retries, Retry
from loraplex_platform.gateway.job import (
    ChoiceEnded,
    ChoicePiece,
    Copies,
    Failed,
    FieldNames,
    Finished,
    Job,
    Prepared,
    PumpEvent,
    Started,
)
from loraplex_platform.gateway.middleware import ARRIVED_S, REQUEST_UUID, request_id_of
from loraplex_platform.gateway.openai_schemas import (
    MAX_SUBJECT_CHARS,
    ChatRequest,
    CompletionRequest,
    FinishReasonText,
    UsageReport,
)
from loraplex_platform.gateway.preparation import max_tokens_field, num_top_logprobs
from loraplex_platform.gateway.pump import Pump
from loraplex_platform.gateway.queries import ServedModel
from loraplex_platform.gateway.request_parsing import chat_messages, parse_chat, parse_completion
from loraplex_platform.gateway.revision_choice import (
    Side,
    Who,
    choose_revision,
    is_scored,
    is_shadowed,
    may_call,
    unknown_model,
)
from loraplex_platform.gateway.revision_params import InvalidRevisionError
from loraplex_platform.gateway.routing import Replica
from loraplex_platform.gateway.structure import chat_structure, completion_structure
from loraplex_platform.gateway.text_stream import TextPiece
from loraplex_platform.gateway.tools import ToolPlan
from loraplex_platform.ids import format_id
from loraplex_platform.playground import revision_ticket
from loraplex_platform.rates.admission import Claim
from loraplex_platform.tenancy.authentication import Authenticated, require_scope

Parsed = TypeVar("Parsed")
OnUnserved = Callable[[PlatformError], None]  # told of what is refused before it is on the books
Endpoint = Literal["chat.completions", "completions"]

router = APIRouter(prefix="/v1", tags=["Completions"])

_BODY_TIMEOUT_S = 60.0
_SMALL_BODY_BYTES = 128 * 1024
_SMALL_ANSWER = 16 * 1024  # of `TextPiece.size`: a few milliseconds of work
CONVERSATION_HEADER = "x-loraplex-conversation-id"


@router.post("/chat/completions", **openapi.CHAT)
async def create_chat_completion(
    request: Request, gateway: ThisGateway, caller: Caller
) -> Response:
    """Answer a conversation with the model or adapter deployment named in `model`.

    What a request leaves out, the deployment's revision may say: a system prompt, for conversations that
    have no system or developer message of their own, and defaults for `temperature`, `top_p`, `top_k`,
    `min_p`, the penalties, `max_tokens` and `stop`. What the request says itself always counts, also where
    that is a value that switches something off. There is no default seed.
    """
    require_scope(caller, "inference")
    raw = await _read_body(request)
    retry = await _begin(request, gateway, caller, "chat.completions", raw)
    if isinstance(retry, Response):
        return retry
    body, messages = await _parse(_parse_chat, raw)
    structure = await chat_structure(body, gateway.tokenizer.tool_format)
    found = await _find_model(gateway, caller, body.model)
    model, side = await _choose(
        request,
        gateway,
        caller,
        found,
        Who(
            user=body.safety_identifier or body.user,
            conversation_id=_conversation_id(request, body.metadata),
            messages=((message.role, message.content) for message in messages),
        ),
    )
    prepare = partial(gateway.preparer.chat, body=body, messages=messages, structure=structure)
    on_unserved = partial(
        gateway.unserved.note,
        request_id=request.scope[REQUEST_UUID],
        caller=caller,
        found=found,
        model=model,
        side=side,
        endpoint="chat.completions",
        is_stream=bool(body.stream),
        prepare=prepare,
    )
    job = _job(
        request,
        gateway,
        caller,
        model=model,
        endpoint="chat.completions",
        body=body,
        prepared=await _prepare(prepare, model, on_unserved),
        side=side,
        copies=_copies(request, found, side, prepare),
        tools=structure.tools,
        retry=retry,
    )
    return await run(
        request,
        gateway,
        job,
        gate=await _gate(request, gateway, caller, job),
        on_unserved=on_unserved,
        shape=partial(ChatAnswer, tools=structure.tools),
        includes_usage=_includes_usage(body),
        num_top_logprobs=num_top_logprobs(body),
    )


@router.post("/completions", **openapi.COMPLETIONS)
async def create_completion(request: Request, gateway: ThisGateway, caller: Caller) -> Response:
    """Continue a raw prompt, given as text or as token ids.

    The revision's sampling defaults hold as for conversations; its system prompt does not.
    """
    require_scope(caller, "inference")
    raw = await _read_body(request)
    retry = await _begin(request, gateway, caller, "completions", raw)
    if isinstance(retry, Response):
        return retry
    body = await _parse(parse_completion, raw)
    structure = await completion_structure(body)
    found = await _find_model(gateway, caller, body.model)
    who = Who(user=body.user, conversation_id=_conversation_id(request))
    model, side = await _choose(request, gateway, caller, found, who)
    prepare = partial(gateway.preparer.completion, body=body, structure=structure)
    on_unserved = partial(
        gateway.unserved.note,
        request_id=request.scope[REQUEST_UUID],
        caller=caller,
        found=found,
        model=model,
        side=side,
        endpoint="completions",
        is_stream=bool(body.stream),
        prepare=prepare,
    )
    job = _job(
        request,
        gateway,
        caller,
        model=model,
        endpoint="completions",
        body=body,
        prepared=await _prepare(prepare, model, on_unserved),
        side=side,
        copies=_copies(request, found, side, prepare),
        retry=retry,
    )
    return await run(
        request,
        gateway,
        job,
        gate=await _gate(request, gateway, caller, job),
        on_unserved=on_unserved,
        shape=CompletionAnswer,
        includes_usage=_includes_usage(body),
        num_top_logprobs=num_top_logprobs(body),
    )


def direct_routes() -> list[Route]:
    """The two endpoints without the framework's way to parameters, of which they have none in need of it.

    FastAPI documents them; put before its own routes these answer. It is a matter of half a millisecond
    a request, for what every request would do with the same outcome.
    """
    return [
        _direct("/v1/chat/completions", create_chat_completion),
        _direct("/v1/completions", create_completion),
    ]


def _direct(path: str, endpoint: Callable[..., Awaitable[Response]]) -> Route:
    async def answer(request: Request) -> Response:
        return await endpoint(request, gateway_of(request), await caller_of(request))

    return _NamedRoute(path, answer, methods=["POST"], include_in_schema=False)


class _NamedRoute(Route):
    """Is in the scope as the framework's are, also where only the path fits: logs and metrics name it."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """As Starlette's."""
        match, found = super().matches(scope)
        return match, {**found, "route": self}


# ---------------------------------------------------------------------------- checking


async def _read_body(request: Request) -> bytes:
    try:
        async with asyncio.timeout(_BODY_TIMEOUT_S):
            return await request.body()
    except TimeoutError:
        raise RequestTimeoutError(f"The body took longer than {_BODY_TIMEOUT_S:g} s.") from None
    except ClientDisconnect:
        raise AbandonedError("The client left while it sent the body.") from None


async def _begin(
    request: Request, gateway: Gateway, caller: Authenticated, endpoint: Endpoint, body: bytes
) -> Retry | Response | None:
    """`Retries.begin`; what it answers itself nothing admits, so the caller is looked up again here.

    A kept answer is only for who may still call its model.
    """

    async def confirm() -> Authenticated:
        who = await find_caller(request, is_fresh=True)
        require_scope(who, "inference")
        return who

    try:
        retry = await gateway.retries.begin(request, caller, endpoint, body)
    except (ConflictError, IdempotencyReuseError):
        await confirm()
        raise
    if isinstance(retry, Response):
        parse = parse_chat if endpoint == "chat.completions" else parse_completion
        asked = await _parse(parse, body)
        await _find_model(gateway, await confirm(), asked.model)
    return retry


async def _parse(parse: Callable[[bytes], Parsed], body: bytes) -> Parsed:
    """Parse; a large body in a thread, so that it does not hold up everybody's streams."""
    if len(body) <= _SMALL_BODY_BYTES:
        return parse(body)
    return await asyncio.to_thread(parse, body)


def _parse_chat(body: bytes) -> tuple[ChatRequest, list[ChatMessage]]:
    request = parse_chat(body)
    return request, chat_messages(request.messages)


async def _find_model(gateway: Gateway, caller: Authenticated, name: str) -> ServedModel:
    """What the name stands for; to this caller nothing that its key may not call."""
    finding = queries.find_model(
        gateway.sessions,
        caller.tenant_id,
        gateway.settings.base_model,
        name,
        known=gateway.known_revisions,
    )
    model = await within(gateway.settings.database_deadline_s, finding)
    if model is None or not may_call(caller, model):
        raise unknown_model(name)
    return model


async def _choose(
    request: Request, gateway: Gateway, caller: Authenticated, found: ServedModel, who: Who
) -> tuple[ServedModel, Side | None]:
    """`choose_revision`, or what the control API has signed that the playground wants."""
    ticket = request.headers.get(revision_ticket.HEADER)
    if ticket is None:
        return choose_revision(caller, found, who)
    revision_id = revision_ticket.read(gateway.settings.key_pepper, caller.tenant_id, ticket)
    finding = gateway.known_revisions.find(gateway.sessions, [revision_id])
    for revision in await within(gateway.settings.database_deadline_s, finding):
        is_its_own = (revision.deployment_id, revision.tenant_id, revision.base_model) == (
            found.deployment_id,
            found.revision.tenant_id,
            found.base_model,
        )
        model = found.answered_by(revision)
        if is_its_own and may_call(caller, model):
            revision.check_usable()
            return model, Side("named")
    raise unknown_model(found.public_name)


def _conversation_id(request: Request, metadata: dict[str, str] | None = None) -> str | None:
    """As the client states it: in a header, which clients can set for all endpoints, or in `metadata`."""
    stated = request.headers.get(CONVERSATION_HEADER)
    if stated is None:
        return (metadata or {}).get("conversation_id")
    if len(stated) > MAX_SUBJECT_CHARS:
        raise InvalidValueError(
            f"Invalid value for the header '{CONVERSATION_HEADER}': expected at most"
            f" {MAX_SUBJECT_CHARS} characters.",
            param=CONVERSATION_HEADER,
        )
    return stated


async def _prepare(
    prepare: Callable[[ServedModel], Awaitable[Prepared]],
    model: ServedModel,
    on_unserved: OnUnserved,
) -> Prepared:
    try:
        model.revision.check_usable()
        return await prepare(model)
    except (InvalidRequestError, InvalidRevisionError) as error:
        on_unserved(error)
        raise


def _copies(
    request: Request,
    found: ServedModel,
    side: Side | None,
    prepare: Callable[[ServedModel], Awaitable[Prepared]],
) -> Copies | None:
    """What its rollout wants of this request besides its answer, if it is drawn for that."""
    rollout = found.rollout
    if side is None or rollout is None or side.rollout_id is None:
        return None
    request_id = request.scope[REQUEST_UUID]
    copies = Copies(
        is_shadowed=is_shadowed(request_id, rollout),
        is_scored=is_scored(request_id, rollout),
        stable=found,
        prepare=prepare,
    )
    return copies if copies.is_shadowed or copies.is_scored else None


def _job(
    request: Request,
    gateway: Gateway,
    caller: Authenticated,
    *,
    model: ServedModel,
    endpoint: Endpoint,
    body: ChatRequest | CompletionRequest,
    prepared: Prepared,
    side: Side | None,
    copies: Copies | None,
    retry: Retry | None,
    tools: ToolPlan | None = None,
) -> Job:
    return Job(
        request_id=request.scope[REQUEST_UUID],
        tenant_id=caller.tenant_id,
        key_id=caller.key_id,
        tenant_salt=gateway.salt_of(caller.tenant_id),
        model=model,
        endpoint=endpoint,
        is_stream=bool(body.stream),
        prompt_ids=prepared.prompt_ids,
        sampling=prepared.sampling,
        stops=prepared.stops,
        tools=tools,
        params=_params(body, max_tokens_field(body)),
        shows_stop=bool(body.include_stop_str_in_output),
        arrived_s=request.scope[ARRIVED_S],
        timeout_s=gateway.settings.request_timeout_s,
        priority=caller.priority,
        weight=caller.weight,
        memory_weight=caller.memory_weight,
        max_adapters=caller.max_adapters,
        retry=retry,
        side=side,
        copies=copies,
    )


async def _gate(request: Request, gateway: Gateway, caller: Authenticated, job: Job) -> RateGate:
    """The request's way past its rate limits; its answer's headers say how they stand."""

    async def claim_of(who: Authenticated, *, is_fresh: bool) -> Claim:
        return await gateway.admissions.claim(
            who,
            job.request_id,
            job.model,
            prompt_tokens=len(job.prompt_ids),
            max_completion_tokens=job.sampling.max_tokens * job.sampling.n,
            is_fresh=is_fresh,
        )

    async def reload() -> Claim:
        # All that was decided by what we remembered of the caller is decided again. The gate is looked up, not
        # held on to: it holds this function, and the two would be left to the garbage collector.
        gate = request.scope.get(RATES)  # not there any more: the client has left
        who = await find_caller(request, is_fresh=True)
        require_scope(who, "inference")
        await _find_model(gateway, who, job.model.public_name)
        if not may_call(who, job.model):  # a rollout's other side may be of another adapter
            raise unknown_model(job.model.public_name)
        if gate is not None:
            request.scope[RATES] = gate
        return await claim_of(who, is_fresh=True)

    claim = await claim_of(caller, is_fresh=False)
    gate = RateGate(gateway.admissions.rates, claim, reload)
    request.scope[RATES] = gate
    return gate


def _params(body: ChatRequest | CompletionRequest, max_tokens: str) -> FieldNames:
    """Which fields to name should the engine refuse the request."""
    grammar = None
    if body.structured_outputs is not None:
        grammar = "structured_outputs"
    elif isinstance(body, ChatRequest):
        has_format = body.response_format is not None and body.response_format.type != "text"
        grammar = "response_format" if has_format else "tools" if body.tools else None
    banning = ("allowed_token_ids", "bad_words", "min_tokens", "logit_bias")
    bans = next((name for name in banning if getattr(body, name)), grammar)
    return FieldNames(max_tokens=max_tokens, grammar=grammar, bans=bans)


def _includes_usage(body: ChatRequest | CompletionRequest) -> bool:
    return bool(body.stream_options and body.stream_options.include_usage)


# ---------------------------------------------------------------------------- running


@dataclass(frozen=True, slots=True)
class _Listener:
    """One response's ear at a pump, and the watch for its client."""

    pump: Pump
    watch: asyncio.Task[None]

    def leave(self) -> None:
        """The response is over, however: a pump that still runs has lost its client."""
        self.watch.cancel()
        self.pump.abandon()


def _place(gateway: Gateway, job: Job) -> tuple[Job, Replica]:
    """The job and who runs it first.

    Of a rollout's stable side the build that is tried is no choice. Where none else is ready, an answer by it
    is better than none, but says nothing of either side: the request then counts for neither.

    Raises:
        EngineUnavailableError: nobody.
    """
    choose = gateway.router.choose
    base_model, length = job.model.base_model, job.num_tokens
    try:
        return job, choose(base_model, length, builds=job.builds)
    except EngineUnavailableError:
        if job.builds != job.model.builds:
            with contextlib.suppress(EngineUnavailableError):
                stand_in = choose(base_model, length, builds=job.model.builds)
                return replace(job, side=None, copies=None), stand_in
        raise


async def run(
    request: Request,
    gateway: Gateway,
    job: Job,
    *,
    gate: RateGate | None = None,
    on_unserved: OnUnserved | None = None,
    shape: Callable[[AnswerHead, TokenBytes], Answer],
    includes_usage: bool,
    num_top_logprobs: int | None,
) -> Response:
    """Run a checked request and answer it; raises what ends it before its first token."""
    try:
        job, replica = _place(gateway, job)
    except EngineUnavailableError as error:
        if on_unserved is not None:
            on_unserved(error)
        raise
    pump = gateway.make_pump(
        job,
        replica,
        metrics=gateway.metrics,
        on_closed=gateway.copying.note,
        gate=gate,
    )
    gateway.pumps.start(pump)
    listener = _Listener(pump, asyncio.create_task(_watch_client(request, pump)))
    is_streaming = False
    try:
        first = await _first_event(pump, gateway.settings.header_hold_s, is_bounded=job.is_stream)
        if isinstance(first, Failed):
            # The book is its revision's word, and nothing was reserved: no row would say so.
            if isinstance(first.error, NoPriceError) and on_unserved is not None:
                on_unserved(first.error)
            raise first.error
        fingerprint = pump.replica.fingerprint
        if isinstance(first, Started):
            fingerprint = first.model_fingerprint
        revision = format_id("deployment_revision", job.model.revision.id)
        head = AnswerHead(
            request_id=job.request_id,
            created=int(time.time()),
            model=job.model.public_name,
            system_fingerprint=_system_fingerprint(fingerprint, revision),
            includes_usage=includes_usage,
            num_top_logprobs=num_top_logprobs,
            num_choices=job.sampling.n,
        )
        answer = shape(head, gateway.tokenizer.token_bytes)
        headers = {"x-loraplex-revision": revision, **_side_headers(job.side)}
        if pump.clamped_max_tokens is not None:
            headers["x-loraplex-max-tokens"] = str(pump.clamped_max_tokens)
        if job.is_stream:
            chunks = _chunks(pump, answer, first, request_id_of(request.scope))
            if job.retry is not None and job.retry.keeps_answer:
                chunks = _keeping(chunks, gateway.retries, job, job.retry, headers)
            stream = EventStream(
                chunks,
                headers=headers,
                ping_interval_s=gateway.settings.ping_interval_s,
                on_end=listener.leave,
            )
            is_streaming = True
            return stream
        body = await _whole(pump, answer, first)
        if job.retry is not None and job.retry.keeps_answer:
            kept = Kept("application/json", headers, body)
            await gateway.retries.keep(job.retry.claim, job.request_id, kept)
        return Response(body, headers=headers, media_type="application/json")
    finally:
        if not is_streaming:
            listener.leave()


async def _watch_client(request: Request, pump: Pump) -> None:
    """Abandon the pump once the client has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    pump.abandon()


async def _first_event(pump: Pump, hold_s: float, *, is_bounded: bool) -> PumpEvent | None:
    """The first event; None: a stream's headers can wait no longer."""
    try:
        async with asyncio.timeout(hold_s if is_bounded else None):
            return await pump.next_event()
    except TimeoutError:
        return None


async def _whole(pump: Pump, answer: Answer, first: PumpEvent | None) -> bytes:
    pieces: list[list[TextPiece]] = [[] for _ in range(pump.job.sampling.n)]
    reasons: list[FinishReasonText] = ["stop"] * len(pieces)
    event = first
    while True:
        match event:
            case ChoicePiece():
                pieces[event.index].append(event.piece)
            case ChoiceEnded():
                reasons[event.index] = event.reason
            case Finished():
                return await _build(answer, pieces, reasons, event.usage)
            case Failed():
                raise event.error
        event = await pump.next_event()


async def _build(
    answer: Answer,
    pieces: list[list[TextPiece]],
    reasons: list[FinishReasonText],
    usage: UsageReport,
) -> bytes:
    """The body; a large one in a thread, so that it does not hold up everybody's streams."""

    def build() -> bytes:
        ends = zip(pieces, reasons, strict=True)
        return answer.whole([WholeChoice.of(mine, reason) for mine, reason in ends], usage)

    size = sum(piece.size for mine in pieces for piece in mine)
    return build() if size <= _SMALL_ANSWER else await asyncio.to_thread(build)


async def _chunks(
    pump: Pump, answer: Answer, first: PumpEvent | None, request_id: str
) -> AsyncGenerator[bytes, None]:
    """The frames of a stream: what has come meanwhile goes out in one piece."""
    has_begun = False
    events = [] if first is None else [first]
    while True:
        frames: list[bytes] = []
        for event in events:
            if not (has_begun or isinstance(event, Failed)):
                has_begun = True
                frames += map(frame, answer.first_frames())
            match event:
                case ChoicePiece():
                    shown = answer.frame(event.index, event.piece)
                    if shown is not None:
                        frames.append(frame(shown))
                case ChoiceEnded():
                    frames += map(frame, answer.end_frames(event.index, event.reason))
                case Finished():
                    frames += map(frame, answer.last_frames(event.usage))
                    yield b"".join((*frames, DONE))
                    return
                case Failed():
                    if not isinstance(event.error, AbandonedError):
                        frames.append(frame(envelope(event.error, request_id)))
                    yield b"".join(frames)
                    return
        if frames:
            yield b"".join(frames)
        events = await pump.next_events()


async def _keeping(
    chunks: AsyncGenerator[bytes, None],
    retries: Retries,
    job: Job,
    retry: Retry,
    headers: dict[str, str],
) -> AsyncGenerator[bytes, None]:
    """The same chunks; all of them are kept for a retry before the last one goes out."""
    parts: list[bytes] = []
    size = 0
    async with contextlib.aclosing(chunks):
        async for chunk in chunks:
            size += len(chunk)
            if size <= MAX_ANSWER_BYTES:
                parts.append(chunk)
                if chunk.endswith(DONE):
                    kept = Kept(HEADERS["content-type"], headers, b"".join(parts))
                    await retries.keep(retry.claim, job.request_id, kept)
            yield chunk


def _side_headers(side: Side | None) -> dict[str, str]:
    """Where the answer stands in a rollout: the tenant's own affair, and what its bug reports need."""
    if side is None:
        return {}
    headers: dict[str, str] = {"x-loraplex-arm": side.arm}
    if side.rollout_id is not None:
        headers["x-loraplex-rollout"] = format_id("rollout", side.rollout_id)
    return headers


def _system_fingerprint(model_fingerprint: str, revision: str) -> str:
    digest = hashlib.sha256((model_fingerprint + revision).encode()).hexdigest()
    return f"fp_{digest[:16]}"
