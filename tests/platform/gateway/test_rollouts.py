"""Who is answered by which revision: pins, sides of a rollout, parameters of a revision, engine builds."""

from __future__ import annotations

import asyncio
import json
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import pytest
from loraplex_engine.protocol import Generate
from loraplex_platform.db import AdapterVersion, BaseModel, DeploymentRevision, Request
from loraplex_platform.gateway import queries
from loraplex_platform.ids import format_id, parse_id, uuid7
from loraplex_platform.playground import revision_ticket
from loraplex_platform.rollouts.assignment import assign, subject_of
from sqlalchemy import select

from tests.platform.gateway import tiny_model
from tests.platform.gateway.stand import BASE, Stand, announce, deploy, eventually, says
from tests.platform.gateway.test_key_access import add_key
from tests.support import rollouts
from tests.support.fake_engine import FakeEngine
from tests.support.metering import PEPPER, Customer
from tests.support.rollouts import SALT

pytestmark = pytest.mark.asyncio(loop_scope="package")

OLD, NEW = "sha256:" + "1" * 64, "sha256:" + "2" * 64
HELLO = [{"role": "user", "content": "hello"}]


class Deployed:
    """A deployment of acme's whose current revision is of one adapter, and a second revision of another."""

    def __init__(self, stand: Stand, name: str) -> None:
        self.stand = stand
        self.name = name

    @classmethod
    async def make(cls, stand: Stand, **canary: Any) -> Deployed:
        self = cls(stand, f"d-{uuid7().hex}")
        tenant_id = stand.customer.tenant_id
        self.base_id = await base_id(stand)
        self.id = await deploy(stand.db, self.base_id, tenant_id, self.name, digest=OLD)
        self.stable_id = await rollouts.current_revision(stand.db, self.id)
        if not canary:
            self.adapter_id, version_id = await rollouts.add_adapter(
                stand.db, tenant_id, self.base_id, f"new-{self.name}", NEW
            )
            canary = {"adapter_version_id": version_id, "adapter_digest": NEW}
        self.canary_id = await rollouts.add_revision(stand.db, self.id, **canary)
        return self

    async def roll_out(self, **values: Any) -> UUID:
        return await rollouts.add_rollout(self.stand.db, self.id, self.canary_id, **values)

    async def ask(
        self,
        client: httpx.AsyncClient | None = None,
        headers: dict[str, str] | None = None,
        **body: Any,
    ) -> httpx.Response:
        client = client or self.stand.http()
        body = {"model": self.name, "messages": HELLO, "max_tokens": 2} | body
        return await client.post("/v1/chat/completions", json=body, headers=headers)

    async def revision_of(self, **body: Any) -> UUID:
        return revision_of(await self.ask(**body))


def revision_of(response: httpx.Response) -> UUID:
    assert response.status_code == 200, response.text
    return parse_id("deployment_revision", response.headers["x-loraplex-revision"])


async def base_id(stand: Stand) -> UUID:
    async with stand.db.sessions() as session:
        return (await session.scalars(select(BaseModel.id))).one()


async def request_of(stand: Stand, response: httpx.Response) -> Request:
    await stand.settled()
    async with stand.db.sessions() as session:
        id_ = parse_id("request", response.headers["x-request-id"])
        return await session.get_one(Request, id_)


# ---------------------------------------------------------------------------- sides


@pytest.mark.parametrize(("weight_bp", "is_canary"), [(0, False), (10_000, True)])
async def test_the_books_and_the_headers_say_which_side_answered(
    stand: Stand, weight_bp: int, is_canary: bool
) -> None:
    deployed = await Deployed.make(stand)
    rollout_id = await deployed.roll_out(weight_bp=weight_bp, step=3)

    answer = await deployed.ask(user="ada", temperature=0.5, seed=7)

    side = "canary" if is_canary else "stable"
    revision_id = deployed.canary_id if is_canary else deployed.stable_id
    assert revision_of(answer) == revision_id
    assert answer.headers["x-loraplex-arm"] == side
    assert answer.headers["x-loraplex-rollout"] == format_id("rollout", rollout_id)
    [sent] = stand.generated
    assert sent.adapter_digest == (NEW if is_canary else OLD)
    request = await request_of(stand, answer)
    subject = subject_of(
        "user", tenant_id=stand.customer.tenant_id, key_id=stand.customer.key_id, user="ada"
    )
    assert request.revision_id == revision_id
    assert (request.rollout_id, request.rollout_step, request.arm) == (rollout_id, 3, side)
    assert request.subject_key == assign(SALT, subject).subject_key
    assert request.sampling == {
        "max_tokens": 2,
        "temperature": 0.5,
        "seed": 7,
        "num_stop_token_ids": 2,
    }
    assert request.fingerprint == stand.engine.model_fingerprint


async def test_without_a_rollout_nothing_is_said_of_one(stand: Stand) -> None:
    deployed = await Deployed.make(stand)

    answer = await deployed.ask()

    assert "x-loraplex-arm" not in answer.headers
    assert "x-loraplex-rollout" not in answer.headers
    request = await request_of(stand, answer)
    assert (request.rollout_id, request.rollout_step, request.arm, request.subject_key) == (
        None,
    ) * 4


@pytest.mark.parametrize("state", ["draft", "evaluating", "promoted", "aborted", "rolled_back"])
async def test_a_rollout_that_has_not_begun_or_is_over_moves_nobody(
    stand: Stand, state: str
) -> None:
    deployed = await Deployed.make(stand)
    ended_at = None if state in ("draft", "evaluating") else datetime.now(UTC)
    rollout_id = await deployed.roll_out(state="canary", shadow_bp=0, weight_bp=10_000)
    await rollouts.change_rollout(stand.db, rollout_id, state=state, weight_bp=0, ended_at=ended_at)

    answer = await deployed.ask()

    assert revision_of(answer) == deployed.stable_id
    assert "x-loraplex-arm" not in answer.headers


async def test_in_a_shadow_step_the_stable_revision_answers(stand: Stand) -> None:
    deployed = await Deployed.make(stand)
    await deployed.roll_out(state="shadow", shadow_bp=0)

    answer = await deployed.ask()

    assert revision_of(answer) == deployed.stable_id
    assert answer.headers["x-loraplex-arm"] == "stable"


async def test_a_weight_holds_from_the_next_request_on(stand: Stand) -> None:
    deployed = await Deployed.make(stand)
    rollout_id = await deployed.roll_out(weight_bp=0)
    assert await deployed.revision_of() == deployed.stable_id

    await rollouts.change_rollout(stand.db, rollout_id, weight_bp=10_000)
    assert await deployed.revision_of() == deployed.canary_id

    await rollouts.abort_rollout(stand.db, rollout_id)
    assert await deployed.revision_of() == deployed.stable_id


def bucket(stand: Stand, **facts: Any) -> int:
    customer = stand.customer
    subject = subject_of(tenant_id=customer.tenant_id, key_id=customer.key_id, **facts)
    return assign(SALT, subject).bucket


def name_with(
    stand: Stand, sticky_by: str, field: str, *, below: int | None = None, least: int = 0
) -> str:
    """One whose bucket is below, or at least that."""
    names = (f"n{i}" for i in range(10_000))
    return next(
        name
        for name in names
        if (b := bucket(stand, sticky_by=sticky_by, **{field: name})) >= least
        and (below is None or b < below)
    )


async def test_users_and_conversations_stay_on_their_side(stand: Stand) -> None:
    by_user, by_talk = await Deployed.make(stand), await Deployed.make(stand)
    await by_user.roll_out(sticky_by="user", weight_bp=5_000)
    await by_talk.roll_out(sticky_by="conversation", weight_bp=5_000)
    for is_canary in (True, False):
        bounds: dict[str, Any] = {"below": 5_000} if is_canary else {"least": 5_000}
        user = name_with(stand, "user", "user", **bounds)
        talk = name_with(stand, "conversation", "conversation_id", **bounds)
        of_user = by_user.canary_id if is_canary else by_user.stable_id
        of_talk = by_talk.canary_id if is_canary else by_talk.stable_id

        for _ in range(2):
            assert await by_user.revision_of(user=user) == of_user
        assert await by_user.revision_of(user="somebody", safety_identifier=user) == of_user
        stated = {"conversation_id": talk}
        for content in ("hi", "and then?"):
            messages = [{"role": "user", "content": content}]
            assert await by_talk.revision_of(metadata=stated, messages=messages) == of_talk
        headers = {"x-loraplex-conversation-id": talk}
        assert await by_talk.revision_of(headers=headers) == of_talk
        plain = await stand.http().post(
            "/v1/completions",
            json={"model": by_talk.name, "prompt": "x", "max_tokens": 1},
            headers=headers,
        )
        assert revision_of(plain) == of_talk


async def test_later_turns_of_a_conversation_stay_on_its_side(stand: Stand) -> None:
    deployed = await Deployed.make(stand)
    await deployed.roll_out(sticky_by="conversation", weight_bp=5_000)
    system = {"role": "developer", "content": "Be brief."}
    for number in range(6):
        turns = [system, {"role": "user", "content": f"question {number}"}]
        first = await deployed.revision_of(messages=turns)
        turns += [{"role": "assistant", "content": "yes"}, {"role": "user", "content": "and?"}]
        assert await deployed.revision_of(messages=turns) == first


async def test_what_names_nobody_goes_by_its_key(stand: Stand) -> None:
    deployed = await Deployed.make(stand)
    weight_bp = bucket(stand, sticky_by="key") + 1
    rollout_id = await deployed.roll_out(sticky_by="user", weight_bp=weight_bp)
    assert await deployed.revision_of() == deployed.canary_id

    await rollouts.change_rollout(stand.db, rollout_id, weight_bp=weight_bp - 1)

    assert await deployed.revision_of() == deployed.stable_id


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"user": "x" * 513}, "user"),
        ({"safety_identifier": "x" * 513}, "safety_identifier"),
        ({"metadata": {"conversation_id": "x" * 513}}, "metadata[...]"),
        ({"metadata": {"conversation_id": 3}}, "metadata[...]"),
        ({"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
    ],
)
async def test_a_subject_that_cannot_be_is_refused_by_its_field(
    stand: Stand, body: dict[str, Any], param: str
) -> None:
    answer = await stand.http().post(
        "/v1/chat/completions", json={"model": BASE, "messages": HELLO} | body
    )

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


async def test_a_conversations_header_is_bounded(stand: Stand) -> None:
    headers = {"x-loraplex-conversation-id": "x" * 513}
    body = {"model": BASE, "messages": HELLO}

    answer = await stand.http().post("/v1/chat/completions", json=body, headers=headers)

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "x-loraplex-conversation-id"


async def test_a_key_that_may_not_call_the_canary_is_outside_of_the_rollout(stand: Stand) -> None:
    deployed = await Deployed.make(stand)
    await deployed.roll_out(weight_bp=10_000)
    async with stand.db.sessions() as session:
        stable = await session.get_one(DeploymentRevision, deployed.stable_id)
        statement = select(queries.AdapterVersion.adapter_id).where(
            queries.AdapterVersion.id == stable.adapter_version_id
        )
        old_adapter = (await session.scalars(statement)).one()
    _, only_old = await add_key(stand, (("adapter", old_adapter),))
    _, both = await add_key(stand, (("adapter", old_adapter), ("adapter", deployed.adapter_id)))
    _, deployment = await add_key(stand, (("deployment", deployed.id),))

    outside = await deployed.ask(stand.http(only_old))
    inside = await deployed.ask(stand.http(both))
    by_name = await deployed.ask(stand.http(deployment))

    assert revision_of(outside) == deployed.stable_id
    assert "x-loraplex-arm" not in outside.headers
    assert (await request_of(stand, outside)).arm is None
    assert revision_of(inside) == revision_of(by_name) == deployed.canary_id


async def test_an_abort_leaves_a_stream_on_its_revision(stand: Stand) -> None:
    deployed = await Deployed.make(stand)
    rollout_id = await deployed.roll_out(weight_bp=10_000)
    stand.engine.script = says("one two three four")
    stand.engine.pause()
    body = {"model": deployed.name, "messages": HELLO, "stream": True, "max_tokens": 32}

    async def stream() -> tuple[httpx.Response, list[str]]:
        # Its headers come with the first token.
        async with stand.http().stream("POST", "/v1/chat/completions", json=body) as response:
            return response, [line async for line in response.aiter_lines() if line]

    streaming = asyncio.create_task(stream())
    await eventually(lambda: len(stand.generated) == 1, "a stream")
    await rollouts.abort_rollout(stand.db, rollout_id)
    after = asyncio.create_task(deployed.ask(max_tokens=4))
    await eventually(lambda: len(stand.generated) == 2, "a request after it")
    stand.engine.resume()
    response, frames = await streaming

    assert frames[-1] == "data: [DONE]"
    assert revision_of(response) == deployed.canary_id
    assert [sent.adapter_digest for sent in stand.generated] == [NEW, OLD]
    assert revision_of(await after) == deployed.stable_id
    first = await request_of(stand, response)
    assert (first.revision_id, first.arm, first.finish_reason) == (
        deployed.canary_id,
        "canary",
        "stop",
    )


async def test_a_retry_gets_its_answer_with_its_side(stand: Stand) -> None:
    deployed = await Deployed.make(stand)
    rollout_id = await deployed.roll_out(weight_bp=10_000)
    headers = {"idempotency-key": uuid7().hex}
    first = await deployed.ask(headers=headers)
    await rollouts.abort_rollout(stand.db, rollout_id)

    again = await deployed.ask(headers=headers)

    for name in ("x-loraplex-revision", "x-loraplex-arm", "x-loraplex-rollout"):
        assert again.headers.get(name) == first.headers[name] or again.status_code == 409


# ---------------------------------------------------------------------------- pins


async def test_a_pin_beats_a_rollout_until_its_time_is_over(stand: Stand) -> None:
    deployed = await Deployed.make(stand)
    await deployed.roll_out(weight_bp=10_000)
    tenant_id = stand.customer.tenant_id
    until = datetime.now(UTC) + timedelta(hours=1)
    await rollouts.add_pin(stand.db, tenant_id, deployed.id, deployed.stable_id, until=until)

    pinned = await deployed.ask()

    assert revision_of(pinned) == deployed.stable_id
    assert pinned.headers["x-loraplex-arm"] == "pinned"
    assert "x-loraplex-rollout" not in pinned.headers
    request = await request_of(stand, pinned)
    assert (request.arm, request.rollout_id, request.subject_key) == ("pinned", None, None)

    await change_pin(stand, deployed.id, until=datetime.now(UTC) - timedelta(seconds=1))
    assert await deployed.revision_of() == deployed.canary_id

    await change_pin(stand, deployed.id, until=None)
    assert await deployed.revision_of() == deployed.stable_id

    await change_pin(stand, deployed.id, expired_at=datetime.now(UTC))
    assert await deployed.revision_of() == deployed.canary_id


async def test_a_revision_is_named_by_the_control_apis_word_and_by_nobody_elses(
    stand: Stand,
) -> None:
    deployed = await Deployed.make(stand)
    await deployed.roll_out(weight_bp=10_000)
    mine, theirs = stand.customer.tenant_id, stand.stranger.tenant_id
    other = await Deployed.make(stand)

    def ticket(tenant_id: UUID, revision_id: UUID, **options: Any) -> dict[str, str]:
        signed = revision_ticket.sign(PEPPER, tenant_id, revision_id, **options)
        return {revision_ticket.HEADER: signed}

    named = await deployed.ask(headers=ticket(mine, deployed.stable_id))
    refused = [
        await deployed.ask(headers=headers)
        for headers in (
            ticket(theirs, deployed.stable_id),
            ticket(mine, deployed.stable_id, now_s=time.time() - 61),
            {revision_ticket.HEADER: format_id("deployment_revision", deployed.stable_id)},
            {revision_ticket.HEADER: "rev_x.12x.ff"},
            {revision_ticket.HEADER: ""},
        )
    ]
    of_another = await deployed.ask(headers=ticket(mine, other.stable_id))

    assert revision_of(named) == deployed.stable_id
    assert named.headers["x-loraplex-arm"] == "named"
    assert "x-loraplex-rollout" not in named.headers
    request = await request_of(stand, named)
    assert (request.arm, request.rollout_id, request.subject_key) == ("named", None, None)
    assert [answer.status_code for answer in refused] == [403] * 5
    assert {answer.json()["error"]["code"] for answer in refused} == {"permission_denied"}
    assert of_another.status_code == 404
    assert of_another.json()["error"]["code"] == "model_not_found"
    assert await deployed.revision_of() == deployed.canary_id
    await stand.check_books()


async def test_a_named_revision_is_one_that_the_key_may_call_and_that_can_be_served(
    stand: Stand,
) -> None:
    deployed = await Deployed.make(stand)
    async with stand.db.sessions() as session:
        adapters = {
            revision_id: await session.scalar(
                select(AdapterVersion.adapter_id)
                .join(
                    DeploymentRevision, DeploymentRevision.adapter_version_id == AdapterVersion.id
                )
                .where(DeploymentRevision.id == revision_id)
            )
            for revision_id in (deployed.stable_id, deployed.canary_id)
        }
    granted = adapters[deployed.stable_id]
    assert granted is not None
    assert granted != adapters[deployed.canary_id]
    _, secret = await add_key(stand, (("adapter", granted),))
    faulty = await rollouts.add_revision(stand.db, deployed.id, params={"temperature": "hot"})

    def ticket(revision_id: UUID) -> dict[str, str]:
        signed = revision_ticket.sign(PEPPER, stand.customer.tenant_id, revision_id)
        return {revision_ticket.HEADER: signed}

    of_it = await deployed.ask(stand.http(secret), headers=ticket(deployed.stable_id))
    of_another = await deployed.ask(stand.http(secret), headers=ticket(deployed.canary_id))
    with_any = await deployed.ask(headers=ticket(deployed.canary_id))
    broken = await deployed.ask(headers=ticket(faulty))

    assert revision_of(of_it) == deployed.stable_id
    assert (of_another.status_code, of_another.json()["error"]["code"]) == (404, "model_not_found")
    assert revision_of(with_any) == deployed.canary_id
    assert (broken.status_code, broken.json()["error"]["code"]) == (500, "revision_invalid")


async def change_pin(stand: Stand, deployment_id: UUID, **values: Any) -> None:
    async with stand.db.transaction() as session:
        pin = await session.get_one(queries.Pin, (stand.customer.tenant_id, deployment_id))
        for name, value in values.items():
            setattr(pin, name, value)


async def test_a_pin_holds_an_earlier_revision_when_another_becomes_current(stand: Stand) -> None:
    deployed = await Deployed.make(stand)
    await rollouts.add_pin(
        stand.db, stand.customer.tenant_id, deployed.id, deployed.canary_id, until=None
    )

    assert await deployed.revision_of() == deployed.canary_id
    shown = await stand.http().get(f"/v1/models/{deployed.name}")
    assert shown.status_code == 200


async def test_one_tenants_pin_on_the_base_touches_nobody_else(own_stand: Stand) -> None:
    stand = own_stand
    base = await queries.find_model(stand.db.sessions, stand.customer.tenant_id, BASE, BASE)
    assert base is not None
    canary_id = await rollouts.add_revision(
        stand.db, base.deployment_id, params={"sampling": {"temperature": 0.25}}
    )
    await rollouts.add_rollout(stand.db, base.deployment_id, canary_id, weight_bp=10_000)
    await rollouts.add_pin(stand.db, stand.customer.tenant_id, base.deployment_id, base.revision.id)
    answers: dict[str, httpx.Response] = {}
    customers: dict[str, Customer] = {"acme": stand.customer, "globex": stand.stranger}
    for name, customer in customers.items():
        body = {"model": BASE, "messages": HELLO, "max_tokens": 2}
        answers[name] = await stand.http(customer.secret).post("/v1/chat/completions", json=body)

    assert revision_of(answers["acme"]) == base.revision.id
    assert revision_of(answers["globex"]) == canary_id
    assert answers["acme"].headers["x-loraplex-arm"] == "pinned"
    assert answers["globex"].headers["x-loraplex-arm"] == "canary"
    assert [sent.sampling.temperature for sent in stand.generated] == [1.0, 0.25]
    await stand.check_books()


# ---------------------------------------------------------------------------- parameters


async def test_a_revision_says_what_a_request_leaves_open(stand: Stand) -> None:
    defaults = {
        "temperature": 0.25,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "repetition_penalty": 1.5,
        "max_tokens": 12,
        "stop": ["END"],
    }
    params = {"system_prompt": "Answer in verse.", "sampling": defaults}
    deployed = await Deployed.make(stand, params=params)
    await deployed.roll_out(weight_bp=10_000)
    stand.engine.script = says("so END it", end=False)

    answer = await deployed.ask(max_tokens=None)
    told = await deployed.ask(
        messages=[{"role": "system", "content": "Shout."}, *HELLO],
        max_tokens=3,
        temperature=0,
        stop=[],
    )

    open_, closed = stand.generated
    assert answer.json()["choices"][0]["message"]["content"] == "so "
    for name in set(defaults) - {"stop"}:
        assert getattr(open_.sampling, name) == defaults[name], name
    text = tiny_model.reference().decode(open_.prompt_token_ids, skip_special_tokens=False)
    assert "Answer in verse." in text
    assert (closed.sampling.max_tokens, closed.sampling.temperature) == (3, 0)
    assert closed.sampling.top_p == 0.5
    text = tiny_model.reference().decode(closed.prompt_token_ids, skip_special_tokens=False)
    assert "Shout." in text
    assert "verse" not in text
    assert told.json()["choices"][0]["finish_reason"] == "length"
    first = await request_of(stand, answer)
    assert first.sampling is not None
    assert first.sampling["top_k"] == 7
    assert first.sampling["num_stops"] == 1
    assert "END" not in json.dumps(first.sampling)


async def test_a_default_of_more_tokens_than_are_left_is_no_error(stand: Stand) -> None:
    deployed = await Deployed.make(stand, params={"sampling": {"max_tokens": 100_000}})
    await deployed.roll_out(weight_bp=10_000)
    stand.engine.script = says("ok")

    answer = await deployed.ask(max_tokens=None)
    plain = await stand.http().post("/v1/completions", json={"model": deployed.name, "prompt": "x"})

    assert answer.status_code == plain.status_code == 200
    for sent in stand.generated:
        assert len(sent.prompt_token_ids) + sent.sampling.max_tokens == tiny_model.CONTEXT_LENGTH


async def test_a_revision_that_cannot_be_read_fails_by_its_name(stand: Stand) -> None:
    deployed = await Deployed.make(stand, params={"sampling": {"temperature": "hot"}})
    rollout_id = await deployed.roll_out(weight_bp=10_000)

    answer = await deployed.ask()

    assert answer.status_code == 500
    error = answer.json()["error"]
    assert error["code"] == "revision_invalid"
    assert format_id("deployment_revision", deployed.canary_id) in error["message"]
    assert "sampling.temperature" in error["message"]
    await rollouts.abort_rollout(stand.db, rollout_id)
    assert (await deployed.ask()).status_code == 200


# ---------------------------------------------------------------------------- builds


async def test_a_revision_with_a_build_is_run_by_that_build_alone(
    own_stand: Stand, short_tmp_path: Path
) -> None:
    stand = own_stand
    build = "sha256:" + "b" * 64
    build_id = await rollouts.add_build(stand.db, BASE, build)
    deployed = await Deployed.make(stand, engine_build_id=build_id)
    rollout_id = await deployed.roll_out(weight_bp=0)

    await rollouts.change_rollout(stand.db, rollout_id, weight_bp=10_000)
    away = await deployed.ask()

    assert away.status_code == 503
    assert away.json()["error"]["code"] == "engine_unavailable"
    assert build in away.json()["error"]["message"]
    # Its side's gates count it, or they would never see a canary whose replicas are gone.
    refused = await request_of(stand, away)
    assert (refused.arm, refused.rollout_id, refused.state) == ("canary", rollout_id, "voided")
    assert (refused.http_status, refused.error_code) == (503, "engine_unavailable")
    assert refused.replica_id is None

    new = FakeEngine(
        short_tmp_path,
        replica_id="fake-1",
        model_fingerprint=build,
        max_model_len=tiny_model.CONTEXT_LENGTH - 100,
        vocab_size=400,
    )
    async with new:
        announce(stand.redis_url, new)
        await eventually(lambda: stand.gateway.router.num_ready == 2, "the second build")
        answers = [await deployed.ask() for _ in range(6)]
        assert len(new.received_of(Generate)) == 6
        assert stand.generated == []
        assert {revision_of(answer) for answer in answers} == {deployed.canary_id}
        assert (await request_of(stand, answers[0])).fingerprint == build
        # Its own context length counts, not that of other builds.
        too_long = await deployed.ask(max_tokens=tiny_model.CONTEXT_LENGTH - 90)
        assert too_long.status_code == 400
        of_canary = answers[0].json()["system_fingerprint"]

        # While it is rolled out, it is for nobody else; then it is only not the first choice.
        await rollouts.change_rollout(stand.db, rollout_id, weight_bp=0)
        for _ in range(6):
            assert await deployed.revision_of() == deployed.stable_id
        assert len(stand.generated) == 6
        stand.engine.is_ready = False
        await rollouts.change_rollout(stand.db, rollout_id, weight_bp=0)
        await eventually(lambda: stand.gateway.router.num_ready == 1, "only the new build")
        # Better an answer than none; but it says nothing of the side that it stands in for.
        stood_in = await deployed.ask()
        assert revision_of(stood_in) == deployed.stable_id
        assert "x-loraplex-arm" not in stood_in.headers
        row = await request_of(stand, stood_in)
        assert (row.fingerprint, row.arm, row.rollout_id) == (build, None, None)
        stand.engine.is_ready = True
        await eventually(lambda: stand.gateway.router.num_ready == 2, "both builds")
        await rollouts.abort_rollout(stand.db, rollout_id)
        for _ in range(6):
            assert await deployed.revision_of() == deployed.stable_id
        assert len(stand.generated) == 12
        stand.engine.is_ready = False
        await eventually(lambda: stand.gateway.router.num_ready == 1, "only the failed build")
        last = await deployed.ask()
        assert revision_of(last) == deployed.stable_id
        assert last.json()["system_fingerprint"] != of_canary
        stand.engine.is_ready = True
        await stand.settled()
        assert new.num_running == 0


@pytest.mark.parametrize("state", ["evaluating", "shadow", "canary"])
async def test_a_rollout_to_the_build_that_the_whole_fleet_runs_takes_nobody_down(
    own_stand: Stand, state: str
) -> None:
    stand = own_stand
    [replica] = stand.gateway.router.replicas
    build_id = await rollouts.add_build(stand.db, BASE, replica.fingerprint)
    deployed = await Deployed.make(stand, engine_build_id=build_id)

    await deployed.roll_out(state=state, weight_bp=0)
    answer = await deployed.ask()
    await rollouts.add_pin(
        stand.db,
        stand.customer.tenant_id,
        deployed.id,
        await rollouts.add_revision(stand.db, deployed.id),
    )
    pinned = await deployed.ask()

    assert revision_of(answer) == deployed.stable_id
    assert "x-loraplex-arm" not in answer.headers
    assert pinned.status_code == 200, pinned.text
    assert pinned.headers["x-loraplex-arm"] == "pinned"


async def test_other_weights_of_the_same_name_never_answer(
    own_stand: Stand, short_tmp_path: Path
) -> None:
    stand = own_stand
    deployed = await Deployed.make(stand)
    other = FakeEngine(
        short_tmp_path,
        replica_id="fake-1",
        model_fingerprint="sha256:" + "c" * 64,
        max_model_len=tiny_model.CONTEXT_LENGTH,
        vocab_size=400,
    )
    async with other:
        announce(stand.redis_url, other, base_revision="2", tokenizer_sha256="0" * 64)
        await eventually(lambda: stand.gateway.router.num_ready == 2, "the other weights")
        for _ in range(8):
            assert (await deployed.ask()).status_code == 200
        assert other.received_of(Generate) == []
        stand.engine.is_ready = False
        await eventually(lambda: stand.gateway.router.num_ready == 1, "only the other weights")
        await rollouts.add_pin(stand.db, stand.customer.tenant_id, deployed.id, deployed.stable_id)
        away = await deployed.ask()
        assert away.status_code == 503
        assert away.json()["error"]["code"] == "engine_unavailable"
        assert "with the weights 1 and the tokenizer " + "0" * 64 in away.json()["error"]["message"]

        # Its weights, but another tokenizer; then a record of a process that is no more; then all as named.
        announce(stand.redis_url, other, base_revision="1", tokenizer_sha256="e" * 64)
        await _record_is(stand, tokenizer_sha256="e" * 64)
        assert (await deployed.ask()).status_code == 503
        old = {
            "base_revision": "1",
            "tokenizer_sha256": "0" * 64,
            "model_fingerprint": "sha256:before",
        }
        announce(stand.redis_url, other, **old)
        await _record_is(stand, model_fingerprint="sha256:before")
        assert (await deployed.ask()).status_code == 503
        announce(stand.redis_url, other, base_revision="1", tokenizer_sha256="0" * 64)
        await _record_is(stand, model_fingerprint=other.model_fingerprint)
        assert (await deployed.ask()).status_code == 200
        stand.engine.is_ready = True
        await stand.settled()


async def _record_is(stand: Stand, **facts: str) -> None:
    def is_known() -> bool:
        records = [
            r.record for r in stand.gateway.router.replicas if r.record.replica_id == "fake-1"
        ]
        return any(all(getattr(r, name) == facts[name] for name in facts) for r in records)

    await eventually(is_known, "the record")


async def test_a_canary_that_cannot_be_read_fails_only_its_own_subjects(stand: Stand) -> None:
    deployed = await Deployed.make(stand, params={"sampling": {"temperature": "hot"}})
    rollout_id = await deployed.roll_out(weight_bp=0)

    stable = await deployed.ask()
    await rollouts.change_rollout(stand.db, rollout_id, state="shadow", shadow_bp=10_000)
    shadowed = await deployed.ask()
    await rollouts.change_rollout(
        stand.db, rollout_id, state="canary", shadow_bp=0, weight_bp=10_000
    )
    canary = await deployed.ask()
    await rollouts.add_pin(stand.db, stand.customer.tenant_id, deployed.id, deployed.stable_id)
    pinned = await deployed.ask()

    assert revision_of(stable) == revision_of(shadowed) == deployed.stable_id
    assert stable.headers["x-loraplex-arm"] == "stable"
    assert canary.status_code == 500
    assert canary.json()["error"]["code"] == "revision_invalid"
    assert revision_of(pinned) == deployed.stable_id
    assert len(stand.generated) == 3


async def test_a_revision_that_nobody_asks_for_is_forgotten(stand: Stand) -> None:
    deployed = await Deployed.make(stand, params={"system_prompt": "a tenant's secret"})
    known = queries.KnownRevisions(idle_s=60.0)
    ids = [deployed.stable_id, deployed.canary_id]
    began_s = time.monotonic()
    assert len(await known.find(stand.db.sessions, ids)) == len(known) == 2

    known.forget_idle(began_s + 59)
    assert len(known) == 2
    await asyncio.sleep(0.05)
    used_s = time.monotonic()
    await known.find(stand.db.sessions, [deployed.stable_id])
    known.forget_idle(used_s + 60)
    assert len(known) == 1
    known.forget_idle(time.monotonic() + 60)
    assert len(known) == 0

    few = queries.KnownRevisions(most=1)
    assert len(await few.find(stand.db.sessions, ids)) == 2
    assert len(few) == 1
