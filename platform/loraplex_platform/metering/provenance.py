"""What exactly answered a request, why that, and what it cost: from its id alone, a year later.

All of it is read from rows that never change (revisions, adapter versions, builds, published price books, the
ledger) or that have a history (pins, rollouts), so that it is the same whatever was deployed, retired,
rolled back or switched off since. Where a row is gone, by retention or with its tenant, that is said.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, Final, Literal, TypeVar
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.billing.money import PICO_PER_USD
from loraplex_platform.db import (
    Adapter,
    AdapterVersion,
    Attempt,
    Base,
    BaseModel,
    Deployment,
    DeploymentRevision,
    EngineBuild,
    LedgerEntry,
    PinEvent,
    Request,
    Rollout,
    Tenant,
)
from loraplex_platform.ids import format_id
from loraplex_platform.metering import provenance_queries as queries
from loraplex_platform.rollouts.assignment import NUM_BUCKETS, Subject, assign

PriceClass = Literal["input", "cached_input", "output", "request"]
TOKENS_PER_PRICE: Final = 1_000_000

_Row = TypeVar("_Row", bound=Base)

_SUBJECTS: Final = {
    "tenant": "the tenant",
    "key": "the API key",
    "user": "the user that it named",
    "conversation": "its conversation",
}


@dataclass(frozen=True, slots=True)
class PriceLine:
    """quantity x price = amount, in pico-USD; the price is per token or request."""

    price_class: PriceClass
    quantity: int
    price_pico: int

    @property
    def amount_pico(self) -> int:
        """Exact."""
        return self.quantity * self.price_pico


@dataclass(frozen=True, slots=True)
class Bill:
    """By which book a request is billed, and what its own line of account comes to.

    Attributes:
        is_revisions_own: the revision names the book; else it was the one in force.
        lines: none while the request is in progress, or when nothing ran.
    """

    price_book_id: UUID
    name: str
    is_revisions_own: bool
    lines: tuple[PriceLine, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """Why this revision.

    Attributes:
        subject: what stays with one side in the rollout, as its `sticky_by` says; None: no rollout.
        bucket: in 0..9999 of it; None: it hangs on a user or a conversation, whose names are not kept.
        weight_bp: of the canary, in that step; None: it was no canary step.
    """

    words: str
    subject: str | None = None
    bucket: int | None = None
    weight_bp: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """All that is known of an answer. `request` None: its month was dropped, the ledger tells the rest."""

    request: Request | None
    ledger: Sequence[LedgerEntry]
    attempts: Sequence[Attempt]
    deployment: Deployment | None
    revision: DeploymentRevision | None
    base_model: BaseModel | None
    adapter: Adapter | None
    version: AdapterVersion | None
    build: EngineBuild | None
    built_from: BaseModel | None  # the weights that the build computes with
    rollout: Rollout | None
    pin: PinEvent | None
    choice: Choice
    bill: Bill | None
    is_erased: bool  # the tenant is, and with it what its revisions said in words of its own

    @property
    def system_prompt_sha256(self) -> str | None:
        """Of the revision's own, if it has one."""
        if self.revision is None:
            return None
        prompt = self.revision.params.get("system_prompt")
        return None if prompt is None else hashlib.sha256(prompt.encode()).hexdigest()

    @property
    def words(self) -> list[str]:
        """For people, in the order in which one asks."""
        return [
            *_words_of_model(self),
            *_words_of_engine(self),
            self.choice.words,
            *_words_of_bill(self),
        ]


async def trace(
    session: AsyncSession, request: Request | None, ledger: Sequence[LedgerEntry]
) -> Provenance:
    """Gather it.

    Args:
        ledger: the request's lines of account, as `ledger_of` finds them; not empty without the request.
    """
    known: Request | LedgerEntry = ledger[0] if request is None else request
    request_id = known.id if isinstance(known, Request) else known.entry_id
    revision = await _get(session, DeploymentRevision, known.revision_id)
    named = known.adapter_version_id
    found = None if named is None else await queries.find_adapter(session, named)
    fingerprint = None if request is None else request.fingerprint
    build = None if fingerprint is None else await queries.find_build(session, fingerprint)
    rollout = await _get(session, Rollout, None if request is None else request.rollout_id)
    pin = None
    if request is not None and request.arm == "pinned" and request.deployment_id is not None:
        pin = await queries.find_pin_at(
            session, request.tenant_id, request.deployment_id, request.admitted_at
        )
    tenant = await session.get(Tenant, known.tenant_id)
    return Provenance(
        request=request,
        ledger=ledger,
        attempts=await queries.attempts_of(session, request_id),
        deployment=await _get(session, Deployment, known.deployment_id),
        revision=revision,
        base_model=await _get(
            session, BaseModel, None if revision is None else revision.base_model_id
        ),
        adapter=None if found is None else found[0],
        version=None if found is None else found[1],
        build=build,
        built_from=await _get(session, BaseModel, None if build is None else build.base_model_id),
        rollout=rollout,
        pin=pin,
        choice=_choice(request, rollout, pin),
        bill=await _bill(session, request_id, ledger, revision),
        is_erased=tenant is not None and tenant.erased_at is not None,
    )


async def _get(session: AsyncSession, model: type[_Row], row_id: UUID | None) -> _Row | None:
    return None if row_id is None else await session.get(model, row_id)


# ---------------------------------------------------------------------------- why this revision


def _choice(request: Request | None, rollout: Rollout | None, pin: PinEvent | None) -> Choice:
    if request is None:
        return Choice("Why this revision is no longer known: the request log has let go of it.")
    if request.kind == "probe":
        return Choice("It was the platform's own, to try out a revision; nobody was charged.")
    if request.kind == "shadow":
        return Choice(_words_of_shadow(request))
    if request.arm == "pinned":
        return Choice(_words_of_pin(pin))
    if request.arm == "named":
        return Choice("Whoever asked in the console's playground chose this revision by name.")
    if request.rollout_id is None:
        return Choice("No pin and no rollout had a say: it was the deployment's current revision.")
    name = f"the rollout {format_id('rollout', request.rollout_id)}"
    side = f"the {request.arm} side answered"
    if rollout is None:
        return Choice(f"In {name}, of which nothing is kept or it is the platform's own, {side}.")
    step = _step(rollout, request.rollout_step)
    if step is None or step.get("kind") != "canary":
        return Choice(
            f"In {name}, at its step {_number(request)}, in which the canary answers nobody, {side}.",
            subject=rollout.sticky_by,
        )
    weight_bp = int(step["weight_bp"])
    subject, bucket = _place(request, rollout)
    whose = _SUBJECTS[subject]
    at = f"In {name}, at its step {_number(request)} (canary at {weight_bp / 100:g} %), {side}"
    if bucket is None:
        why = f"as {whose} falls; whose it is, is not kept, only its key {request.subject_key}"
    else:
        is_below = "is below" if bucket < weight_bp else "is not below"
        why = f"for the bucket of {whose}, {bucket} of {NUM_BUCKETS:,}, {is_below} {weight_bp}"
    return Choice(f"{at}: {why}.", subject=subject, bucket=bucket, weight_bp=weight_bp)


def _words_of_shadow(request: Request) -> str:
    of = "" if request.shadow_of is None else f" {format_id('request', request.shadow_of)}"
    if request.endpoint == "score":
        return f"It computed how likely the answer to{of} is under another revision; nobody was charged."
    return f"It asked the canary what{of} had asked; nobody got its answer, and nobody was charged."


def _words_of_pin(pin: PinEvent | None) -> str:
    if pin is None or pin.revision_id is None:
        return "The tenant had pinned the deployment to this revision; of the pin nothing is kept."
    until = "for good" if pin.until is None else f"until {_day(pin.until)}"
    return (
        f"The tenant had pinned the deployment to this revision on {_day(pin.at)}, {until}, by"
        f" {pin.created_by}: {pin.reason}"
    )


def _step(rollout: Rollout, number: int | None) -> dict[str, Any] | None:
    is_one = number is not None and 0 <= number < len(rollout.steps)
    return rollout.steps[number] if is_one and number is not None else None


def _number(request: Request) -> str:
    """As people count."""
    return "?" if request.rollout_step is None else str(request.rollout_step + 1)


def _place(request: Request, rollout: Rollout) -> tuple[str, int | None]:
    """The subject and its bucket. A user or a conversation cannot be computed again from what is kept."""
    subjects = [Subject("tenant", request.tenant_id, b"")]
    if request.key_id is not None:
        subjects.append(Subject("key", request.tenant_id, request.key_id.bytes))
    for subject in subjects:
        assigned = assign(rollout.salt, subject)
        if assigned.subject_key == request.subject_key:
            return subject.kind, assigned.bucket
    return rollout.sticky_by, None


# ---------------------------------------------------------------------------- what it cost


async def _bill(
    session: AsyncSession,
    request_id: UUID,
    ledger: Sequence[LedgerEntry],
    revision: DeploymentRevision | None,
) -> Bill | None:
    prices = await queries.prices_of(session, request_id)
    if prices is None:
        return None
    lines: tuple[PriceLine, ...] = ()
    usage = next((entry for entry in ledger if entry.kind == "usage"), None)
    if usage is not None:
        quantities: tuple[tuple[PriceClass, int], ...] = (
            ("input", usage.prompt_tokens - usage.cached_tokens),
            ("cached_input", usage.cached_tokens),
            ("output", usage.completion_tokens),
            ("request", 1),
        )
        lines = tuple(
            PriceLine(price_class, int(quantity), int(getattr(prices, price_class)))
            for price_class, quantity in quantities
        )
    return Bill(
        prices.price_book_id,
        prices.name,
        revision is not None and revision.price_book_id == prices.price_book_id,
        lines,
    )


# ---------------------------------------------------------------------------- words


def _words_of_model(of: Provenance) -> Iterator[str]:
    if of.request is not None:
        yield f"It asked for the model {of.request.model}{_since(of.deployment)}."
    if of.revision is None:
        yield "Which revision answered is not known: it is older than revisions in the books."
    else:
        yield (
            f"Revision {of.revision.number}"
            f" ({format_id('deployment_revision', of.revision.id)}, sha256 {of.revision.sha256})"
            f" was to answer."
        )
        prompt = of.system_prompt_sha256
        if of.is_erased:
            yield "Its system prompt and sampling defaults, if it had any, went with the tenant."
        elif prompt is None:
            yield "The revision has no system prompt of its own."
        else:
            yield f"Its system prompt (sha256 {prompt}) is for chats that bring none of their own."
    if of.base_model is not None:
        base = of.base_model
        yield (
            f"The base model is {base.name}: weights {base.revision}, tokenizer sha256"
            f" {base.tokenizer_sha256}, chat template sha256 {base.chat_template_sha256}."
        )
    if of.version is not None and of.adapter is not None:
        retired = ", retired since" if of.version.status == "retired" else ""
        yield (
            f"The adapter is {of.adapter.name}, version {of.version.version}: {of.version.digest}"
            f"{retired}."
        )
    elif of.revision is not None and of.revision.adapter_version_id is None:
        yield "No adapter: the base model itself."


def _since(deployment: Deployment | None) -> str:
    if deployment is None:
        return ""
    shown = f" ({format_id('deployment', deployment.id)}"
    if deployment.archived_at is not None:
        shown += f", archived since {_day(deployment.archived_at)}"
    return shown + ")"


def _words_of_engine(of: Provenance) -> Iterator[str]:
    if of.request is None:
        return
    where = f"the replica {of.request.replica_id}" if of.request.replica_id else "no replica"
    if of.request.fingerprint is None:
        yield f"It went to {where}; which engine build that was is not in the books."
    else:
        facts = {} if of.build is None else of.build.facts
        flat = {**facts, **facts.get("backends", {})}
        flat.pop("backends", None)
        known = ", ".join(f"{name} {value}" for name, value in sorted(flat.items()) if value)
        yield (
            f"It ran on {where}, of the engine build {of.request.fingerprint}"
            f"{f' ({known})' if known else ''}."
        )
    if of.built_from is not None and of.base_model is not None and of.built_from != of.base_model:
        yield f"That build computes with the weights {of.built_from.revision}."
    if of.request.sampling is not None:
        sampling = ", ".join(f"{k} {v}" for k, v in sorted(of.request.sampling.items()))
        yield f"Sampling as resolved: {sampling}."
    if of.request.stable_logprob is not None:
        yield (
            "The mean log-probability of its tokens under the rollout's stable revision is"
            f" {of.request.stable_logprob:.4f}."
        )


def _words_of_bill(of: Provenance) -> Iterator[str]:
    if of.bill is not None:
        own = "which its revision names" if of.bill.is_revisions_own else "in force when it came"
        yield f"Its price book is {of.bill.name}, {own}."
        for line in of.bill.lines:
            if line.quantity and (line.price_pico or line.price_class != "request"):
                yield f"{_priced(line)} = ${_usd(line.amount_pico)}."
    for entry in of.ledger:
        yield _words_of_entry(entry)
    for attempt in of.attempts:
        yield (
            f"Attempt {attempt.attempt} generated {attempt.generated:,} tokens: {attempt.billed:,} billed,"
            f" {attempt.absorbed:,} at the platform's expense, {attempt.discarded_past_stop:,} past a stop,"
            f" {attempt.discarded_past_abort:,} past an abort."
        )


_CLASSES: Final[dict[PriceClass, str]] = {
    "input": "prompt tokens",
    "cached_input": "cached prompt tokens",
    "output": "completion tokens",
    "request": "request",
}


def _priced(line: PriceLine) -> str:
    what = f"{line.quantity:,} {_CLASSES[line.price_class]}"
    if line.price_class == "request":
        return f"{what} x ${_usd(line.price_pico)}"
    return f"{what} x ${_usd(line.price_pico * TOKENS_PER_PRICE)} / 1M"


def _words_of_entry(entry: LedgerEntry) -> str:
    amount = f"${_usd(int(entry.amount_pico))}"
    if entry.kind == "reversal":
        return f"Taken back on {_day(entry.occurred_at)}: {amount} ({entry.description})."
    who = "the tenant pays" if entry.account == "revenue" else "the platform pays"
    late = " An attempt that turned up late:" if entry.kind == "late" else ""
    return f"On the ledger:{late} {amount}, {who}."


def _usd(pico: int) -> str:
    """Exact, without zeros that say nothing."""
    return f"{(Decimal(pico) / PICO_PER_USD).normalize():f}"


def _day(at: datetime) -> str:
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
