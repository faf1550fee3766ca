"""What exactly answered a request, on the wire."""

from __future__ import annotations

from typing import Any, Literal
from uuid import UUID

from pydantic import Field

from loraplex_platform.billing.money import CURRENCY, format_usd
from loraplex_platform.control.schemas import Resource, UnixSeconds
from loraplex_platform.ids import format_id
from loraplex_platform.metering.provenance import TOKENS_PER_PRICE, PriceLine, Provenance


class AnsweringRevision(Resource):
    """Immutable; its text is at the deployment's revisions, for who may read those."""

    id: str
    number: int
    sha256: str
    system_prompt_sha256: str | None = Field(
        description="Of the system prompt for chats that bring none of their own; null: it has none."
    )
    sampling_defaults: dict[str, Any] = Field(description="For what requests leave open.")
    engine_build_id: str | None = Field(description="null: any replica of the base.")
    price_book_id: str | None = Field(description="null: the book in force when a request comes.")
    created_at: UnixSeconds


class AnsweringBase(Resource):
    """The revision's base model: its files, by their digests."""

    id: str
    name: str
    revision: str = Field(description="Of the weights.")
    tokenizer_sha256: str
    chat_template_sha256: str


class AnsweringAdapter(Resource):
    """The adapter's version, by its digest."""

    id: str
    name: str
    version_id: str
    version: int
    digest: str
    status: Literal["ready", "retired"]


class AnsweringEngine(Resource):
    """Which replica computed it, of which build: those of one fingerprint give the same bits."""

    replica_id: str | None
    fingerprint: str | None
    engine_build_id: str | None = Field(description="null: no such build is on the books.")
    facts: dict[str, Any] | None
    base_model_revision: str | None = Field(description="The weights that the build computes with.")


class ArmOfRollout(Resource):
    """Which side it was on, and why."""

    arm: Literal["stable", "canary", "shadow", "pinned", "named"] | None = Field(
        description="null: neither a pin nor a rollout had a say."
    )
    why: str
    rollout_id: str | None
    rollout_step: int | None = Field(description="From 0.")
    rollout_state: str | None = Field(description="What has become of the rollout since.")
    subject: str | None = Field(
        description="What stays with one side: tenant, key, user, conversation."
    )
    subject_key: str | None = Field(description="That subject, in this rollout only; 64 bits.")
    bucket: int | None = Field(
        description="0 to 9999, the canary's if below weight_bp. null: of a user or a conversation, whose "
        "names are not kept."
    )
    weight_bp: int | None = Field(description="The canary's share in that step, in basis points.")
    pinned_until: UnixSeconds | None
    pin_reason: str | None
    pinned_by: str | None
    shadow_of: str | None = Field(description="The tenant's own request after which it was made.")


class AppliedPrice(Resource):
    """quantity x price = amount."""

    price_class: Literal["input", "cached_input", "output", "request"]
    quantity: int
    price_usd: str
    per: Literal["1M tokens", "request"]
    amount_usd: str


class AppliedPrices(Resource):
    """By which book, and what its own line of account comes to."""

    price_book_id: str
    name: str
    is_revisions_own: bool = Field(
        description="Its revision names the book; else the one in force."
    )
    prices: list[AppliedPrice]
    currency: Literal["USD"] = CURRENCY


class LineOfAccount(Resource):
    """A row of the ledger: the use itself, an attempt that came late, or what took it back."""

    id: str
    kind: Literal["usage", "late", "reversal"]
    account: str = Field(description="revenue: the tenant pays; absorbed: the platform does.")
    revision_id: str | None = Field(description="What answered, as the ledger itself keeps it.")
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    amount_usd: str
    description: str | None
    created_at: UnixSeconds


class AttemptResource(Resource):
    """generated = billed + absorbed + discarded_past_stop + discarded_past_abort, in tokens."""

    attempt: int
    replica_id: str | None
    outcome: Literal["completed", "aborted", "fault", "lost"]
    source: Literal["terminal", "journal", "observed"]
    generated: int
    billed: int
    absorbed: int
    discarded_past_stop: int
    discarded_past_abort: int


class AnsweredBy(Resource):
    """What exactly answered, why that, and what it cost; the same whatever has changed since."""

    words: list[str]
    model: str | None = Field(description="The name that was asked for.")
    deployment_id: str | None
    revision: AnsweringRevision | None
    base_model: AnsweringBase | None
    adapter: AnsweringAdapter | None = Field(description="null: the base model itself.")
    engine: AnsweringEngine | None
    sampling: dict[str, Any] | None = Field(
        description="As resolved from request, revision and defaults."
    )
    chosen: ArmOfRollout
    price: AppliedPrices | None
    ledger: list[LineOfAccount]
    attempts: list[AttemptResource]
    itl_mean_ms: float | None
    itl_p95_ms: float | None
    stable_logprob: float | None = Field(
        description="Mean log-probability of the answer under the rollout's stable revision, if sampled."
    )


def show_answer(found: Provenance) -> AnsweredBy:
    """As the API shows it."""
    request = found.request
    deployment_id = found.ledger[0].deployment_id if request is None else request.deployment_id
    return AnsweredBy(
        words=found.words,
        model=None if request is None else request.model,
        deployment_id=_id("deployment", deployment_id),
        revision=_revision(found),
        base_model=_base(found),
        adapter=_adapter(found),
        engine=_engine(found),
        sampling=None if request is None else request.sampling,
        chosen=_chosen(found),
        price=_price(found),
        ledger=_ledger(found),
        attempts=[
            AttemptResource.model_validate(attempt, from_attributes=True)
            for attempt in found.attempts
        ],
        itl_mean_ms=None if request is None else request.itl_mean_ms,
        itl_p95_ms=None if request is None else request.itl_p95_ms,
        stable_logprob=None if request is None else request.stable_logprob,
    )


def _id(kind: str, value: UUID | None) -> str | None:
    return None if value is None else format_id(kind, value)


def _revision(found: Provenance) -> AnsweringRevision | None:
    revision = found.revision
    if revision is None:
        return None
    return AnsweringRevision(
        id=format_id("deployment_revision", revision.id),
        number=revision.number,
        sha256=revision.sha256,
        system_prompt_sha256=found.system_prompt_sha256,
        sampling_defaults=revision.params.get("sampling", {}),
        engine_build_id=_id("engine_build", revision.engine_build_id),
        price_book_id=_id("price_book", revision.price_book_id),
        created_at=revision.created_at,
    )


def _base(found: Provenance) -> AnsweringBase | None:
    base = found.base_model
    if base is None:
        return None
    return AnsweringBase(
        id=format_id("base_model", base.id),
        name=base.name,
        revision=base.revision,
        tokenizer_sha256=base.tokenizer_sha256,
        chat_template_sha256=base.chat_template_sha256,
    )


def _adapter(found: Provenance) -> AnsweringAdapter | None:
    if found.version is None or found.adapter is None:
        return None
    return AnsweringAdapter(
        id=format_id("adapter", found.adapter.id),
        name=found.adapter.name,
        version_id=format_id("adapter_version", found.version.id),
        version=found.version.version,
        digest=found.version.digest,
        status=found.version.status,  # type: ignore[arg-type]  # checked by the table
    )


def _engine(found: Provenance) -> AnsweringEngine | None:
    if found.request is None:
        return None
    build = found.build
    return AnsweringEngine(
        replica_id=found.request.replica_id,
        fingerprint=found.request.fingerprint,
        engine_build_id=None if build is None else format_id("engine_build", build.id),
        facts=None if build is None else build.facts,
        base_model_revision=None if found.built_from is None else found.built_from.revision,
    )


def _chosen(found: Provenance) -> ArmOfRollout:
    request, pin, choice = found.request, found.pin, found.choice
    has_key = request is not None and request.subject_key is not None
    return ArmOfRollout(
        arm=None if request is None else request.arm,  # type: ignore[arg-type]  # checked by the table
        why=choice.words,
        rollout_id=None if request is None else _id("rollout", request.rollout_id),
        rollout_step=None if request is None else request.rollout_step,
        rollout_state=None if found.rollout is None else found.rollout.state,
        subject=choice.subject,
        # As text: JSON's numbers have 53 bits.
        subject_key=str(request.subject_key) if request is not None and has_key else None,
        bucket=choice.bucket,
        weight_bp=choice.weight_bp,
        pinned_until=None if pin is None else pin.until,
        pin_reason=None if pin is None else pin.reason,
        pinned_by=None if pin is None else pin.created_by,
        shadow_of=None if request is None else _id("request", request.shadow_of),
    )


def _price(found: Provenance) -> AppliedPrices | None:
    if found.bill is None:
        return None
    return AppliedPrices(
        price_book_id=format_id("price_book", found.bill.price_book_id),
        name=found.bill.name,
        is_revisions_own=found.bill.is_revisions_own,
        prices=[_show_line(line) for line in found.bill.lines],
    )


def _show_line(line: PriceLine) -> AppliedPrice:
    is_request = line.price_class == "request"
    shown_pico = line.price_pico * (1 if is_request else TOKENS_PER_PRICE)
    return AppliedPrice(
        price_class=line.price_class,
        quantity=line.quantity,
        price_usd=format_usd(shown_pico) if is_request else format_usd(shown_pico)[:-6],
        per="request" if is_request else "1M tokens",
        amount_usd=format_usd(line.amount_pico),
    )


def _ledger(found: Provenance) -> list[LineOfAccount]:
    return [
        LineOfAccount(
            id=format_id("adjustment" if entry.kind == "reversal" else "request", entry.entry_id),
            kind=entry.kind,  # type: ignore[arg-type]  # what `ledger_of` finds
            account=entry.account,
            revision_id=None
            if entry.revision_id is None
            else format_id("deployment_revision", entry.revision_id),
            prompt_tokens=entry.prompt_tokens,
            cached_tokens=entry.cached_tokens,
            completion_tokens=entry.completion_tokens,
            amount_usd=format_usd(int(entry.amount_pico)),
            description=entry.description,
            created_at=entry.occurred_at,
        )
        for entry in found.ledger
    ]
