"""A request, explained from its id alone: what exactly answered, why that, and what it cost."""

from __future__ import annotations

import hashlib
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

import psycopg
import pytest
import redis
from loraplex_platform.audit.service import SYSTEM
from loraplex_platform.billing import adjustments
from loraplex_platform.db.tenant_scope import enter_tenants
from loraplex_platform.ids import format_id, parse_id, uuid7
from loraplex_platform.metering import service
from loraplex_platform.metering.provenance import Provenance
from loraplex_platform.metering.provenance_queries import prices_of
from loraplex_platform.metering.records import Settlement
from loraplex_platform.quotas.explain import explain
from loraplex_platform.retention import service as retention
from loraplex_platform.rollouts.assignment import Subject, assign, subject_of

from tests.platform.control.people import member
from tests.platform.control.stand import Stand, error_of
from tests.support.billing import NIL, Model, add_book, add_model, as_owner, month_ago
from tests.support.command_line import commands
from tests.support.metering import Customer, add_customer, reservation, settlement
from tests.support.revisions import SALT, add_build, add_revision, add_rollout, age

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from loraplex_platform.db.session import Database

    from tests.support.postgres import PostgresServer

PROMPT = "You are the pirate of acme."
SAMPLING = {"temperature": 0.7, "top_p": 0.9, "max_tokens": 100, "seed": 7}
FINGERPRINT = "fp-of-the-old-fleet"


def old_partitions(url: str) -> set[str]:
    """Of requests, of months before the last."""
    rows = as_owner(
        url,
        "select inhrelid::regclass::text from pg_inherits where inhparent = 'requests'::regclass",
    )
    last = f"requests_y{month_ago(1):%Y}m{month_ago(1):%m}"
    return {name for (name,) in rows if name.startswith("requests_y") and name < last}


def make_month(url: str, month: datetime) -> None:
    """Partitions as they were made in their time."""
    with psycopg.connect(url) as owner:
        for parent in ("requests", "attempts", "engine_usage", "ledger"):
            owner.execute(
                f"do $$ begin execute format('create table {parent}_y{month:%Y}m{month:%m} partition of"
                f" {parent} for values from (%L) to (%L)',"
                f" loraplex_uuid7_floor('{month:%Y-%m-01} 00:00+00'), loraplex_uuid7_floor("
                f"timestamptz '{month:%Y-%m-01} 00:00+00' + interval '1 month')); end $$"
            )


@pytest.fixture
async def old_stand(
    postgres_server: PostgresServer, redis_url: str, short_tmp_path: Path
) -> AsyncIterator[tuple[Stand, str]]:
    """A stand whose database may lose partitions."""
    with postgres_server.clone() as url:
        async with Stand.open(url, redis_url, short_tmp_path) as stand:
            yield stand, url


async def test_a_request_of_last_month_is_explained_whatever_has_changed_since(
    old_stand: tuple[Stand, str],
) -> None:
    stand, url = old_stand
    acme = await stand.tenant("acme")
    tenant_id = parse_id("tenant", acme["id"])
    made = await stand.admin.post(f"/admin/v1/tenants/{acme['id']}/keys", json={"name": "k"})
    customer = Customer(tenant_id, parse_id("api_key", made.json()["id"]), made.json()["secret"])
    version = await stand.version(acme["id"], "pirate")
    path = f"/admin/v1/tenants/{acme['id']}/deployments/pirate-model"
    put = await stand.admin.put(path, json={"version_id": version})
    assert put.status_code == 200, put.text
    deployment_id = parse_id("deployment", put.json()["id"])
    [(base_id, base_revision, tokenizer, template)] = as_owner(
        url, "select id, revision, tokenizer_sha256, chat_template_sha256 from base_models"
    )
    book = add_book(
        url,
        "acme's contract",
        datetime.now(UTC) - timedelta(days=400),
        {
            ("any_adapter", NIL, "input"): 3,
            ("any_adapter", NIL, "cached_input"): 1,
            ("any_adapter", NIL, "output"): 7,
            ("any_adapter", NIL, "request"): 11,
        },
    )
    build = add_build(url, FINGERPRINT, base_id, torch_version="2.9")
    canary = add_revision(
        url,
        deployment_id,
        price_book_id=book,
        params={"system_prompt": PROMPT, "sampling": {"temperature": 0.7}},
    )
    # So that the standard book is in force again, and the contract's is one that has ended.
    add_book(url, "new list", datetime.now(UTC) - timedelta(days=300), {})
    rollout = add_rollout(url, deployment_id, canary, step=2)
    place = assign(SALT, subject_of("key", tenant_id=tenant_id, key_id=customer.key_id))
    wanted = reservation(
        customer,
        model="pirate-model",
        deployment_id=deployment_id,
        revision_id=canary,
        adapter_version_id=parse_id("adapter_version", version),
        replica_id="replica-that-was",
        rollout_id=rollout,
        rollout_step=2,
        arm="canary",
        subject_key=place.subject_key,
        sampling=SAMPLING,
    )
    await service.reserve(stand.db.sessions, wanted)
    done = await service.settle(
        stand.db.sessions,
        settlement(
            wanted.request_id,
            usage_cached_tokens=4,
            fingerprint=FINGERPRINT,
            itl_mean_ms=12.5,
            itl_p95_ms=20.0,
        ),
    )
    assert done.amount_pico == 6 * 3 + 4 * 1 + 20 * 7 + 11
    request_id = age(url, wanted.request_id, month_ago(1))
    shown_id = format_id("request", request_id)
    before = (await stand.admin.get(f"/admin/v1/explain/{shown_id}")).json()

    # Everything changes, and a month that is older than retention keeps goes.
    long_ago = month_ago(20, day=1, hour=0)
    make_month(url, long_ago)
    as_owner(
        url,
        "update rollouts set state = 'aborted', ended_at = now(), end_reason = 'no', weight_bp = 0",
    )
    answer = await stand.admin.delete(path)
    assert answer.status_code == 204, answer.text
    as_owner(url, "update adapter_versions set status = 'retired'")
    as_owner(url, "update price_books set status = 'retired' where id = %s", book)
    with redis.Redis.from_url(stand.redis_url) as connection:
        connection.flushall()
    assert old_partitions(url)
    await retention.clean(stand.db.sessions, SYSTEM)
    assert not old_partitions(url)

    answer = await stand.admin.get(f"/admin/v1/explain/{shown_id}")

    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert (found["outcome"], found["request_id"]) == ("completed", shown_id)
    by: dict[str, Any] = found["answered_by"]
    assert by["model"] == "pirate-model"
    assert by["deployment_id"] == put.json()["id"]
    assert by["revision"] == {
        "id": format_id("deployment_revision", canary),
        "number": 2,
        "sha256": "7" * 64,
        "system_prompt_sha256": hashlib.sha256(PROMPT.encode()).hexdigest(),
        "sampling_defaults": {"temperature": 0.7},
        "engine_build_id": None,
        "price_book_id": format_id("price_book", book),
        "created_at": by["revision"]["created_at"],
    }
    assert by["base_model"]["revision"] == base_revision
    assert by["base_model"]["tokenizer_sha256"] == tokenizer
    assert by["base_model"]["chat_template_sha256"] == template
    [(digest,)] = as_owner(url, "select digest from adapter_versions")
    assert by["adapter"]["digest"] == digest
    assert (by["adapter"]["name"], by["adapter"]["version"]) == ("pirate", 1)
    assert by["adapter"]["status"] == "retired"
    assert by["engine"] == {
        "replica_id": "replica-that-was",
        "fingerprint": FINGERPRINT,
        "engine_build_id": format_id("engine_build", build),
        "facts": {"dtype": "float32", "device": "cpu", "torch_version": "2.9"},
        "base_model_revision": base_revision,
    }
    assert by["sampling"] == SAMPLING
    assert by["chosen"]["arm"] == "canary"
    assert by["chosen"]["rollout_id"] == format_id("rollout", rollout)
    assert (by["chosen"]["rollout_step"], by["chosen"]["rollout_state"]) == (2, "aborted")
    assert (by["chosen"]["subject"], by["chosen"]["bucket"]) == ("key", place.bucket)
    assert by["chosen"]["weight_bp"] == 9900
    assert int(by["chosen"]["subject_key"]) == place.subject_key
    assert (by["price"]["name"], by["price"]["is_revisions_own"]) == ("acme's contract", True)
    assert [(p["price_class"], p["quantity"], p["amount_usd"]) for p in by["price"]["prices"]] == [
        ("input", 6, "0.000000000018"),
        ("cached_input", 4, "0.000000000004"),
        ("output", 20, "0.000000000140"),
        ("request", 1, "0.000000000011"),
    ]
    assert [(line["kind"], line["amount_usd"]) for line in by["ledger"]] == [
        ("usage", "0.000000000173")
    ]
    [attempt] = by["attempts"]
    assert (attempt["generated"], attempt["billed"], attempt["absorbed"]) == (20, 20, 0)
    assert (by["itl_mean_ms"], by["itl_p95_ms"]) == (12.5, 20.0)
    # The same as a month ago, but for what is said to have become of things since.
    was = before["answered_by"]
    for part in ("revision", "base_model", "engine", "sampling", "price", "ledger", "attempts"):
        assert by[part] == was[part], part
    text = "\n".join(by["words"])
    for fact in (
        digest,
        FINGERPRINT,
        "7" * 64,
        "temperature 0.7",
        "acme's contract",
        "canary at 99 %",
    ):
        assert fact in text, fact
    # No word of the prompt: who may read the deployment finds it there.
    assert PROMPT not in answer.text

    async with commands(stand) as run:
        plain = await run("explain", shown_id)
        as_json = await run("explain", shown_id, "--json")
    assert plain.code == as_json.code == 0, (plain, as_json)
    assert all(line in plain.out for line in by["words"])
    assert json.loads(as_json.out)["answered_by"] == by


async def test_members_are_told_of_their_own_and_of_no_other_tenants(
    stand: Stand, db_url: str
) -> None:
    acme, globex = await stand.tenant("acme"), await stand.tenant("globex")
    made = await stand.admin.post(f"/admin/v1/tenants/{acme['id']}/keys", json={"name": "k"})
    customer = Customer(parse_id("tenant", acme["id"]), parse_id("api_key", made.json()["id"]), "")
    model = add_model(db_url, customer)
    build = add_build(db_url, FINGERPRINT)
    wanted = at_model(customer, model, current_revision(db_url, model))
    await service.reserve(stand.db.sessions, wanted)
    await service.settle(stand.db.sessions, settlement(wanted.request_id, fingerprint=FINGERPRINT))
    ours = await member(stand, acme["id"], "viewer", "a@acme.example")
    theirs = await member(stand, globex["id"], "owner", "g@globex.example")
    path = f"/admin/v1/explain/{format_id('request', wanted.request_id)}"

    seen = await ours.get(path)
    unseen = await theirs.get(path)

    assert seen.status_code == 200, seen.text
    assert seen.json() == (await stand.admin.get(path)).json()
    by = seen.json()["answered_by"]
    assert by["price"]["prices"][2]["quantity"] == 20
    assert by["engine"]["engine_build_id"] == format_id("engine_build", build)
    error_of(unseen, 404, "not_found")
    # Nor does the database tell prices to those whose request it is not.
    async with stand.db.sessions() as session:
        await enter_tenants(session, [parse_id("tenant", globex["id"])])
        assert await prices_of(session, wanted.request_id) is None


# ---------------------------------------------------------------------------- one fact at a time


def current_revision(url: str, model: Model) -> UUID:
    [(revision_id,)] = as_owner(
        url, "select current_revision_id from deployments where id = %s", model.deployment_id
    )
    return UUID(str(revision_id))


def at_model(customer: Customer, model: Model, revision_id: UUID, **changes: Any) -> Any:
    return reservation(
        customer,
        model=model.name,
        deployment_id=model.deployment_id,
        revision_id=revision_id,
        adapter_version_id=model.adapter_version_id,
        **changes,
    )


async def traced(db: Database, request_id: UUID) -> Provenance:
    async with db.sessions() as session:
        found = await explain(session, format_id("request", request_id))
    assert found.answered_by is not None
    return found.answered_by


async def answered(db: Database, wanted: Any, **ending: Any) -> Provenance:
    await service.reserve(db.sessions, wanted)
    closing: Settlement = settlement(wanted.request_id, **{"kind": wanted.kind} | ending)
    await service.settle(db.sessions, closing)
    return await traced(db, wanted.request_id)


async def test_a_pin_is_told_after_it_was_moved_and_taken_away(db: Database, db_url: str) -> None:
    customer = await add_customer(db)
    model = add_model(db_url, customer)
    first = current_revision(db_url, model)
    second = add_revision(db_url, model.deployment_id, is_current=True)
    names = [customer.tenant_id, model.deployment_id]
    as_owner(
        db_url,
        "insert into pins (tenant_id, deployment_id, revision_id, until, reason, created_by)"
        " values (%s, %s, %s, '2031-01-02T03:04:05Z', 'the audit is on', 'user usr_7')",
        *names,
        first,
    )
    wanted = at_model(customer, model, first, arm="pinned")
    await service.reserve(db.sessions, wanted)
    await service.settle(db.sessions, settlement(wanted.request_id))
    as_owner(
        db_url,
        "update pins set revision_id = %s, reason = 'later' where tenant_id = %s"
        " and deployment_id = %s",
        second,
        *names,
    )
    as_owner(db_url, "delete from pins where tenant_id = %s and deployment_id = %s", *names)

    found = await traced(db, wanted.request_id)

    assert found.pin is not None
    assert (found.pin.revision_id, found.pin.reason) == (first, "the audit is on")
    assert found.choice.words.endswith(
        "until 2031-01-02 03:04:05 UTC, by user usr_7: the audit is on"
    )
    [(count, last)] = as_owner(
        db_url, "select count(*), (array_agg(revision_id order by id desc))[1] from pin_events"
    )
    assert (count, last) == (3, None)


@pytest.mark.parametrize("sticky_by", ["tenant", "key", "user", "conversation"])
async def test_why_a_side_answered_is_computed_again_where_it_can_be(
    db: Database, db_url: str, sticky_by: Any
) -> None:
    customer = await add_customer(db)
    model = add_model(db_url, customer)
    canary = add_revision(db_url, model.deployment_id)
    rollout = add_rollout(db_url, model.deployment_id, canary, sticky_by=sticky_by)
    subject = subject_of(
        sticky_by,
        tenant_id=customer.tenant_id,
        key_id=customer.key_id,
        user="ada",
        conversation_id="c-1",
    )
    place = assign(SALT, subject)
    is_canary = place.is_canary(500)
    side = {
        "rollout_id": rollout,
        "rollout_step": 1,
        "arm": "canary" if is_canary else "stable",
        "subject_key": place.subject_key,
    }
    revision = canary if is_canary else current_revision(db_url, model)

    found = await answered(db, at_model(customer, model, revision, **side))

    choice = found.choice
    assert (choice.subject, choice.weight_bp) == (sticky_by, 500)
    if sticky_by in ("tenant", "key"):
        assert choice.bucket == place.bucket
        below = "is below 500" if is_canary else "is not below 500"
        assert f"{place.bucket} of 10,000, {below}" in choice.words
    else:
        assert choice.bucket is None
        assert str(place.subject_key) in choice.words
    assert f"the {side['arm']} side answered" in choice.words


async def test_who_named_no_user_went_by_its_key(db: Database, db_url: str) -> None:
    customer = await add_customer(db)
    model = add_model(db_url, customer)
    canary = add_revision(db_url, model.deployment_id)
    rollout = add_rollout(db_url, model.deployment_id, canary, sticky_by="user", step=2)
    place = assign(SALT, Subject("key", customer.tenant_id, customer.key_id.bytes))
    side = {"rollout_id": rollout, "rollout_step": 2, "arm": "canary"}

    found = await answered(
        db, at_model(customer, model, canary, subject_key=place.subject_key, **side)
    )

    assert (found.choice.subject, found.choice.bucket) == ("key", place.bucket)
    assert "canary at 99 %" in found.choice.words


async def test_shadows_and_scores_name_the_request_that_they_were_made_for(
    db: Database, db_url: str
) -> None:
    customer = await add_customer(db)
    model = add_model(db_url, customer)
    canary = add_revision(db_url, model.deployment_id)
    rollout = add_rollout(db_url, model.deployment_id, canary, step=0)
    first = uuid7()
    common: dict[str, Any] = {"kind": "shadow", "key_id": None, "shadow_of": first}
    shadow = at_model(
        customer, model, canary, rollout_id=rollout, rollout_step=0, arm="shadow", **common
    )
    score = at_model(customer, model, canary, endpoint="score", **common)

    asked = await answered(db, shadow)
    scored = await answered(db, score)

    for found in (asked, scored):
        assert format_id("request", first) in found.choice.words
        assert [entry.account for entry in found.ledger] == ["absorbed"]
    assert "the platform pays" in "\n".join(asked.words)
    assert "how likely" in scored.choice.words


async def test_a_request_whose_month_is_gone_is_explained_from_the_ledger(
    db: Database, db_url: str
) -> None:
    customer = await add_customer(db)
    model = add_model(db_url, customer)
    revision = add_revision(db_url, model.deployment_id, params={"system_prompt": PROMPT})
    wanted = at_model(customer, model, revision)
    whole = await answered(db, wanted)
    as_owner(db_url, "delete from attempts where request_id = %s", wanted.request_id)
    as_owner(db_url, "delete from requests where id = %s", wanted.request_id)

    async with db.sessions() as session:
        found = await explain(session, format_id("request", wanted.request_id))

    assert (found.outcome, found.tenant_id) == ("archived", customer.tenant_id)
    assert found.answered_by is not None
    by = found.answered_by
    assert by.revision is not None
    assert whole.revision is not None
    assert (by.revision.id, by.system_prompt_sha256) == (revision, whole.system_prompt_sha256)
    assert by.bill == whole.bill
    assert by.version is not None
    assert by.version.id == model.adapter_version_id


async def test_what_was_taken_back_and_what_came_late_are_on_the_account(
    db: Database, db_url: str
) -> None:
    customer = await add_customer(db)
    model = add_model(db_url, customer)
    wanted = at_model(customer, model, current_revision(db_url, model))
    await answered(db, wanted)
    request_id = format_id("request", wanted.request_id)
    async with db.transaction() as session:
        await adjustments.reverse(session, SYSTEM, customer.tenant_id, request_id, "was wrong")
    as_owner(
        db_url,
        "select loraplex_absorb_late(%s, 2, 'replica-2', 10, 0, 5)",
        wanted.request_id,
    )

    found = await traced(db, wanted.request_id)

    assert [(e.kind, e.account) for e in found.ledger] == [
        ("usage", "revenue"),
        ("reversal", "adjust"),
        ("late", "absorbed"),
    ]
    assert found.ledger[2].revision_id == wanted.revision_id
    assert sum(int(e.amount_pico) for e in found.ledger[:2]) == 0
    assert [a.attempt for a in found.attempts] == [1, 2]
    assert any("was wrong" in line for line in found.words)


async def test_of_a_request_in_progress_the_price_is_known_and_no_amount(
    db: Database, db_url: str
) -> None:
    customer = await add_customer(db)
    wanted = reservation(customer)
    await service.reserve(db.sessions, wanted)

    found = await traced(db, wanted.request_id)

    assert found.bill is not None
    assert found.bill.lines == ()
    assert not found.bill.is_revisions_own
    assert found.revision is None
    assert found.attempts == []
