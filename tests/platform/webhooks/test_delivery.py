"""From an event in the outbox to an address that answers: once, signed, patient, and to nobody else."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import ipaddress
import itertools
import json
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from loraplex_platform.audit.service import SYSTEM
from loraplex_platform.db.session import Database
from loraplex_platform.errors import InvalidRequestError
from loraplex_platform.ids import format_id
from loraplex_platform.outbox.relay import Relay
from loraplex_platform.outbox.service import enqueue
from loraplex_platform.webhooks import sender as senders
from loraplex_platform.webhooks import service
from loraplex_platform.webhooks.addresses import AddressRules, OwnerRules, parse_trusted
from loraplex_platform.webhooks.schemas import NewWebhook, WebhookChange
from loraplex_platform.webhooks.sender import Sender
from loraplex_platform.webhooks.service import Deliverer, WithSecret
from loraplex_platform.webhooks.signing import Vault
from pydantic import SecretStr
from standardwebhooks import Webhook as Verifier

from tests.platform.webhooks.receiver import Receiver
from tests.support.metering import add_customer

HERE = AddressRules(parse_trusted("127.0.0.0/8"))
# Receivers are on this machine, also tenants' ones, which production does not allow.
RULES = OwnerRules(operators=HERE, tenants=HERE)
VAULT = Vault(SecretStr("webhook-key-for-tests-0123456789abcdef"))


class World:
    """A database, a relay per topic, a worker's deliverer."""

    def __init__(self, db: Database, db_url: str, sender: Sender) -> None:
        self.db = db
        self.db_url = db_url
        self.told: list[str] = []
        self.deliverer = Deliverer(db.sessions, VAULT, sender, self.told.append)

    async def webhook(self, url: str, tenant_id: UUID | None = None, **fields: Any) -> WithSecret:
        new = NewWebhook.model_validate({"url": url, "topics": ["alert", "invoice"]} | fields)
        async with self.db.transaction() as session:
            return await service.create(session, SYSTEM, VAULT, RULES, tenant_id, new)

    async def event(self, key: str, tenant_id: UUID | None, topic: str = "alert") -> None:
        payload: dict[str, Any] = {"pct": 80, "used": "1200"}
        if tenant_id is not None:
            payload["tenant_id"] = str(tenant_id)
        async with self.db.transaction() as session:
            await enqueue(session, topic, key, payload)

    async def relay(self) -> None:
        for topic in service.webhook_topics(self.db.sessions):
            await Relay(self.db.sessions, topic).relay_once()

    async def deliver(self) -> int:
        await self.relay()
        return await self.deliverer.deliver_once()

    def owner(self, statement: str, *parameters: object) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.db_url) as connection:
            cursor = connection.execute(statement.encode(), parameters)
            return cursor.fetchall() if cursor.description else []

    def hurry(self) -> None:
        """What waits is due now."""
        self.owner("update webhook_deliveries set next_at = now() where status = 'pending'")

    def deliveries(self) -> list[tuple[Any, ...]]:
        return self.owner(
            "select status, tries, last_status, last_error from webhook_deliveries order by id"
        )


@pytest.fixture
async def world(db: Database, db_url: str) -> AsyncIterator[World]:
    async with Sender(RULES) as sender:
        yield World(db, db_url, sender)


async def test_an_event_arrives_once_signed_and_with_the_ids_of_the_api(world: World) -> None:
    tenant_id = (await add_customer(world.db)).tenant_id
    async with Receiver().running() as receiver:
        made = await world.webhook(receiver.url, tenant_id)
        await world.event("limit:1:80", tenant_id)
        await world.deliver()
        # The relay may hand it over again, and the worker come by again.
        world.owner("update outbox set done_at = null, next_at = now()")
        await world.deliver()

    [got] = receiver.got
    content = Verifier(made.secret).verify(got.body, got.headers)
    assert content["type"] == "alert"
    assert content["data"] == {
        "tenant_id": format_id("tenant", tenant_id),
        "pct": 80,
        "used": "1200",
    }
    assert dt.datetime.fromisoformat(content["timestamp"]).tzinfo is not None
    assert got.headers["webhook-id"].startswith("dlv_")
    assert got.headers["content-type"] == "application/json"
    assert world.deliveries() == [("delivered", 1, 204, None)]
    assert world.told == ["delivered"]


async def test_a_tenant_hears_of_itself_only_and_the_operator_of_all(world: World) -> None:
    acme, beta = [(await add_customer(world.db, slug)).tenant_id for slug in ("acme", "beta")]
    async with (
        Receiver().running() as of_acme,
        Receiver().running() as of_beta,
        Receiver().running() as of_operator,
        Receiver().running() as of_invoices,
    ):
        await world.webhook(of_acme.url, acme)
        await world.webhook(of_beta.url, beta)
        await world.webhook(of_operator.url)
        await world.webhook(of_invoices.url, acme, topics=["invoice"])
        await world.event("a", acme)
        await world.event("b", beta)
        await world.event("platform", None)
        await world.event("i", acme, topic="invoice")
        await world.deliver()

    def heard(receiver: Receiver) -> list[tuple[str, str | None]]:
        contents = [json.loads(got.body) for got in receiver.got]
        return sorted((c["type"], c["data"].get("tenant_id")) for c in contents)  # type: ignore[type-var]

    a, b = format_id("tenant", acme), format_id("tenant", beta)
    assert heard(of_acme) == [("alert", a), ("invoice", a)]
    assert heard(of_beta) == [("alert", b)]
    assert len(of_operator.got) == 4
    assert heard(of_invoices) == [("invoice", a)]


async def test_what_fails_is_tried_again_later_under_the_same_id(world: World) -> None:
    async with Receiver(statuses=[500, 429, 200]).running() as receiver:
        await world.webhook(receiver.url)
        await world.event("x", None)
        assert await world.deliver() == 1
        assert await world.deliver() == 0, "it waits"
        assert world.deliveries() == [("pending", 1, 500, "HTTP 500")]
        [(wait,)] = world.owner(
            "select extract(epoch from next_at - now()) from webhook_deliveries"
        )
        assert 3 < wait <= 6.1
        world.hurry()
        await world.deliver()
        world.hurry()
        await world.deliver()

    assert world.deliveries() == [("delivered", 3, 200, None)]
    assert len({got.headers["webhook-id"] for got in receiver.got}) == 1
    assert len({got.body for got in receiver.got}) == 1
    assert world.told == ["failed", "failed", "delivered"]
    assert world.owner("select failing_since from webhooks") == [(None,)]


def test_waits_grow_are_spread_and_end_in_a_day() -> None:
    waits = [service.wait_s(tries) for tries in range(1, 12)]

    assert 4 <= waits[0] <= 6
    assert all(later > earlier for earlier, later in itertools.pairwise(waits[:7]))
    assert max(waits) <= 1.2 * service.MAX_WAIT_S
    assert len({service.wait_s(3) for _ in range(20)}) > 1
    assert 12 <= sum(1 for _ in _until_a_day()) <= 30


def _until_a_day() -> list[float]:
    waited, waits = 0.0, []
    while waited < service.PATIENCE.total_seconds():
        waits.append(service.wait_s(len(waits) + 1))
        waited += waits[-1]
    return waits


async def test_a_redirect_is_a_failure_and_leads_nowhere(world: World) -> None:
    async with Receiver().running() as inside, Receiver(statuses=[302]).running() as receiver:
        receiver.location = inside.url
        await world.webhook(receiver.url)
        await world.event("x", None)
        await world.deliver()

    assert inside.got == []
    assert world.deliveries() == [
        ("pending", 1, 302, "HTTP 302 (redirects are not followed)"),
    ]


async def test_an_address_that_says_nothing_costs_its_own_time_only(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(senders, "TOTAL_TIMEOUT_S", 0.5)
    async with Receiver(hangs=True).running() as mute, Receiver().running() as receiver:
        await world.webhook(mute.url)
        await world.webhook(receiver.url)
        for number in range(10):
            await world.event(f"x{number}", None)
        await world.relay()
        async with asyncio.timeout(20):
            await world.deliverer.deliver_once()

    assert len(receiver.got) == 10
    assert {row[3] for row in world.deliveries() if row[0] == "pending"} == {
        "no answer within 0.5 s"
    }


async def test_a_long_answer_is_not_read_to_its_end(world: World) -> None:
    async with Receiver(statuses=[200], answer_bytes=100 * 1024 * 1024).running() as receiver:
        await world.webhook(receiver.url)
        await world.event("x", None)
        async with asyncio.timeout(10):
            await world.deliver()

    assert receiver.sent_bytes < 50 * 1024 * 1024
    assert world.deliveries()[0][:3] == ("delivered", 1, 200)


async def test_after_a_day_a_message_is_given_up_and_can_be_replayed(world: World) -> None:
    async with Receiver(statuses=[500, 200]).running() as receiver:
        made = await world.webhook(receiver.url)
        await world.event("x", None)
        await world.relay()
        world.owner("update webhook_deliveries set give_up_at = now()")
        await world.deliver()
        assert world.deliveries() == [("failed", 1, 500, "HTTP 500")]
        [(delivery_id,)] = world.owner("select id from webhook_deliveries")

        for _ in range(2):  # also what was delivered
            async with world.db.transaction() as session:
                await service.replay(
                    session,
                    SYSTEM,
                    None,
                    format_id("webhook", made.webhook.id),
                    format_id("webhook_delivery", delivery_id),
                )
            await world.deliver()

    assert world.deliveries() == [("delivered", 1, 200, None)]
    assert {got.headers["webhook-id"] for got in receiver.got} == {
        format_id("webhook_delivery", delivery_id)
    }
    assert len(receiver.got) == 3


async def test_after_three_days_an_address_is_switched_off_and_that_is_an_alert(
    world: World,
) -> None:
    tenant_id = (await add_customer(world.db)).tenant_id
    async with Receiver(statuses=[503]).running() as broken, Receiver().running() as operator:
        made = await world.webhook(broken.url, tenant_id)
        await world.webhook(operator.url)
        await world.event("x", tenant_id)
        await world.event("y", tenant_id)
        await world.deliver()
        world.owner("update webhooks set failing_since = now() - interval '71 hours'"
                    " where failing_since is not null")  # fmt: skip
        world.hurry()
        await world.deliver()
        assert world.owner("select count(*) from webhooks where status = 'enabled'") == [(2,)]
        world.owner("update webhooks set failing_since = now() - interval '73 hours'"
                    " where failing_since is not null")  # fmt: skip
        world.hurry()
        await world.deliver()
        await world.deliver()  # the alert of it

        assert world.owner(
            "select status, disabled_at is not null from webhooks where id = %s", made.webhook.id
        ) == [("failed", True)]
        assert len(broken.got) in (5, 6)
        told = [json.loads(got.body)["data"] for got in operator.got]
        alerts = [data for data in told if data.get("kind") == "webhook_failed"]
        assert [alert["webhook_id"] for alert in alerts] == [format_id("webhook", made.webhook.id)]
        pending = world.owner(
            "select count(*) from webhook_deliveries where webhook_id = %s and status = 'pending'",
            made.webhook.id,
        )
        assert pending == [(0,)]
        assert world.owner(
            "select before, after from audit_log where action = 'webhook.switch_off'"
        ) == [({"status": "enabled"}, {"status": "failed"})]

        # It hears nothing more, until somebody switches it on.
        await world.event("z", tenant_id)
        num_before = len(broken.got)
        await world.deliver()
        assert len(broken.got) == num_before
        async with world.db.transaction() as session:
            await service.change(
                session,
                SYSTEM,
                RULES,
                tenant_id,
                format_id("webhook", made.webhook.id),
                WebhookChange(status="enabled"),
                None,
            )
        await world.event("z2", tenant_id)
        await world.deliver()
        assert len(broken.got) == num_before + 1


async def test_gone_is_taken_at_its_word(world: World) -> None:
    async with Receiver(statuses=[410]).running() as receiver:
        await world.webhook(receiver.url)
        await world.event("x", None)
        await world.deliver()

    assert world.owner("select status from webhooks") == [("failed",)]
    assert world.deliveries()[0][0] == "failed"


async def test_two_workers_at_once_send_each_message_once(world: World) -> None:
    async with Receiver().running() as receiver, Sender(RULES) as other_sender:
        await world.webhook(receiver.url)
        for number in range(30):
            await world.event(f"x{number}", None)
        await world.relay()
        other = Deliverer(world.db.sessions, VAULT, other_sender)
        await asyncio.gather(world.deliverer.deliver_once(), other.deliver_once())

    assert len(receiver.got) == 30
    assert len({got.headers["webhook-id"] for got in receiver.got}) == 30


async def test_a_worker_that_dies_while_it_sends_leaves_the_message_to_the_next(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Receiver(hangs=True).running() as receiver:
        await world.webhook(receiver.url)
        await world.event("x", None)
        task = asyncio.create_task(world.deliver())
        await receiver.has_some.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert await world.deliverer.deliver_once() == 0, "its claim lasts a minute"
        receiver.hangs = False
        world.hurry()
        await world.deliver()

    assert world.deliveries()[0][:3] == ("delivered", 2, 204)
    assert len({got.headers["webhook-id"] for got in receiver.got}) == 1


async def test_while_the_operators_key_is_missing_messages_wait_and_nobody_is_blamed(
    world: World,
) -> None:
    async with Receiver().running() as receiver, Sender(RULES) as sender:
        await world.webhook(receiver.url)
        await world.event("x", None)
        await world.relay()
        await Deliverer(world.db.sessions, Vault(None), sender).deliver_once()

        assert receiver.got == []
        assert world.owner("select failing_since, status from webhooks") == [(None, "enabled")]
        world.hurry()
        await world.deliver()
        assert len(receiver.got) == 1


async def test_a_rotated_secret_signs_beside_the_old_one_until_its_grace_is_over(
    world: World,
) -> None:
    async with Receiver().running() as receiver:
        made = await world.webhook(receiver.url)
        async with world.db.transaction() as session:
            new = await service.rotate(
                session,
                SYSTEM,
                VAULT,
                None,
                format_id("webhook", made.webhook.id),
                dt.timedelta(hours=1),
            )
        await world.event("x", None)
        await world.deliver()
        world.owner("update webhooks set old_secret_until = now()")
        await world.event("y", None)
        await world.deliver()

    first, second = receiver.got
    for secret in (made.secret, new.secret):
        Verifier(secret).verify(first.body, first.headers)
    Verifier(new.secret).verify(second.body, second.headers)
    assert " " in first.headers["webhook-signature"]
    assert " " not in second.headers["webhook-signature"]


def certificate(folder: Path, name: str) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Contexts of a server that is `name`, and of a client that trusts exactly it."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    try:
        alternative: x509.GeneralName = x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        alternative = x509.DNSName(name)
    now = dt.datetime.now(dt.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([alternative]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    cert_file, key_file = folder / "cert.pem", folder / "key.pem"
    cert_file.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    key_file.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(cert_file, key_file)
    return server, ssl.create_default_context(cafile=str(cert_file))


@pytest.mark.parametrize(
    ("name", "is_trusted", "is_delivered"),
    [("localhost", True, True), ("other.example", True, False), ("localhost", False, False)],
)
async def test_https_checks_the_name_although_the_address_is_pinned(
    world: World, tmp_path: Path, name: str, is_trusted: bool, is_delivered: bool
) -> None:
    rules = AddressRules(parse_trusted("127.0.0.0/8, ::1/128"))
    server, client = certificate(tmp_path, name)
    async with (
        Receiver().running(server) as receiver,
        Sender(OwnerRules(rules), ssl_context=client if is_trusted else None) as sender,
    ):
        url = f"https://localhost:{receiver.port}/"
        outcome = await sender.send(url, "dlv_1", b"{}", [], tenant_id=None)

    assert outcome.is_delivered == is_delivered
    assert (outcome.error or "").startswith("TLS: " if not is_delivered else "")
    assert bool(receiver.got) == is_delivered


async def test_an_address_inside_is_not_even_connected_to(world: World) -> None:
    async with Receiver().running() as receiver, Sender(OwnerRules()) as sender:
        outcome = await sender.send(receiver.url, "dlv_1", b"{}", [], tenant_id=None)
        # Names inside cannot be told from names that there are not.
        unknown = await sender.send("https://nowhere.invalid/", "dlv_1", b"{}", [], tenant_id=None)

    assert (outcome.is_delivered, outcome.status) == (False, None)
    assert outcome.error == "the host has no address on the public internet"
    assert unknown == outcome
    assert receiver.got == []


async def test_networks_that_the_operator_trusts_are_not_open_to_tenants(world: World) -> None:
    tenant_id = (await add_customer(world.db)).tenant_id
    rules = OwnerRules(operators=HERE)
    async with Receiver().running() as receiver, Sender(rules) as sender:
        deliverer = Deliverer(world.db.sessions, VAULT, sender)
        await world.webhook(receiver.url, tenant_id)  # made while the rules were others
        await world.event("x", tenant_id)
        await world.relay()
        await deliverer.deliver_once()
        assert receiver.got == []
        assert world.deliveries() == [
            ("pending", 1, None, "the host has no address on the public internet")
        ]

        await world.webhook(receiver.url)
        await world.event("y", tenant_id)
        await world.relay()
        await deliverer.deliver_once()
        assert len(receiver.got) == 1

    new = NewWebhook.model_validate({"url": receiver.url, "topics": ["alert"]})
    for owner_id in (tenant_id, None):
        refused: Any = pytest.raises(InvalidRequestError, match="not a public")
        with refused if owner_id else contextlib.nullcontext():
            async with world.db.transaction() as session:
                await service.create(session, SYSTEM, VAULT, rules, owner_id, new)


def break_tls(context: ssl.SSLContext, listener: socket.socket, count: int) -> None:
    """Take `count` connections, and answer each request with what no key has encrypted."""
    for _ in range(count):
        connection, _address = listener.accept()
        with connection.dup() as raw:
            # The handshake is good: only who reads on learns that something is wrong.
            tls = context.wrap_socket(connection, server_side=True)
            tls.recv(4096)
            raw.sendall(b"\x17\x03\x03\x00\x20" + b"x" * 32)
            with contextlib.suppress(OSError):
                tls.recv(4096)
            tls.close()


async def test_tls_that_breaks_after_the_handshake_is_an_outcome_and_hurts_no_other(
    world: World, tmp_path: Path
) -> None:
    server, client = certificate(tmp_path, "localhost")
    rules = OwnerRules(AddressRules(parse_trusted("127.0.0.0/8, ::1/128")))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        broken = asyncio.create_task(asyncio.to_thread(break_tls, server, listener, 2))
        async with Receiver().running() as receiver, Sender(rules, ssl_context=client) as sender:
            deliverer = Deliverer(world.db.sessions, VAULT, sender, world.told.append)
            await world.webhook(f"https://localhost:{listener.getsockname()[1]}/")
            await world.webhook(receiver.url)
            await world.event("x", None)
            await world.relay()
            assert await deliverer.deliver_once() == 2
            world.owner("update webhook_deliveries set give_up_at = now(), next_at = now()"
                        " where status = 'pending'")  # fmt: skip
            assert await deliverer.deliver_once() == 1
            await broken

    assert len(receiver.got) == 1
    assert sorted(world.told) == ["delivered", "failed", "given_up"]
    [error] = [row[3] for row in world.deliveries() if row[0] == "failed"]
    assert error.startswith("TLS: ")


async def test_what_nobody_thought_of_is_an_outcome_too(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Sender.send

    async def send(self: Sender, url: str, *rest: Any, **more: Any) -> senders.Outcome:
        if url.endswith("/odd"):
            raise ZeroDivisionError
        return await original(self, url, *rest, **more)

    monkeypatch.setattr(Sender, "send", send)
    async with Receiver().running() as receiver:
        await world.webhook(receiver.url + "/odd")
        await world.webhook(receiver.url)
        await world.event("x", None)
        assert await world.deliver() == 2

    assert len(receiver.got) == 1
    assert sorted(row[0] for row in world.deliveries()) == ["delivered", "pending"]
    assert world.owner("select count(*) from webhooks where failing_since is not null") == [(0,)]
