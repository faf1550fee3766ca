"""Another engine build, or other weights, are rolled out like anything else: two kinds of replicas side by side."""

from __future__ import annotations

import asyncio
import itertools
import math
import struct
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import pytest
from loraplex_engine.protocol import Generate
from loraplex_platform.control.app import create_app
from loraplex_platform.db import BaseModel, Request
from loraplex_platform.db.session import open_database
from loraplex_platform.fleet.absorbed import Answer
from loraplex_platform.gateway import scoring
from loraplex_platform.gateway.app import open_gateway
from loraplex_platform.gateway.context import Gateway
from loraplex_platform.ids import parse_id
from loraplex_platform.metering.invariants import check_invariants
from loraplex_platform.settings import WorkerSettings
from loraplex_platform.worker.app import open_worker
from sqlalchemy import select

from tests.platform.control.stand import BASE, Stand, announce, cheap_passwords, settings_for
from tests.platform.evals.stand import deploy_adapter
from tests.platform.gateway import stand as gateway_stand
from tests.platform.gateway.stand import eventually, serving
from tests.platform.rollouts.stand import NO_GATES
from tests.support.engine_process import start_engine
from tests.support.fake_engine import FakeEngine
from tests.support.postgres import database_settings, serving_url
from tests.support.tiny_fleet import write_model

USERS = [f"user-{number}" for number in range(24)]
MODEL = "one"
FLAGS = ("--max-model-len", "512", "--num-blocks", "200", "--max-num-seqs", "8")
SHARE: dict[str, Any] = {"max_increase": 0.3, "min_requests": 20}


@dataclass(slots=True)
class World:
    """A control API, a worker and a gateway of one tenant; replicas are the test's."""

    stand: Stand
    gateway: Gateway
    client: httpx.AsyncClient
    tenant: str

    @classmethod
    @asynccontextmanager
    async def beside(cls, stand: Stand, db_url: str, model: Path) -> AsyncIterator[World]:
        folder, redis_url = stand.folder, stand.redis_url
        worker = WorkerSettings.model_validate(
            {
                "database_url": serving_url(db_url),
                "redis_url": redis_url,
                "base_model": BASE,
                "rollout_interval_s": 0.1,
            }
        )
        settings = gateway_stand.settings_for(db_url, redis_url, folder / "gw", model_dir=model)
        tenant = (await stand.tenant("acme"))["id"]
        key = await stand.admin.post(f"/admin/v1/tenants/{tenant}/keys", json={"name": "k"})
        async with AsyncExitStack() as stack:
            enter = stack.enter_async_context
            gateway = await enter(open_gateway(settings))
            url = await enter(serving(gateway))
            await enter(open_worker(worker))
            headers = {"authorization": f"Bearer {key.json()['secret']}"}
            client = await enter(httpx.AsyncClient(base_url=url, headers=headers, timeout=60))
            yield cls(stand, gateway, client, tenant)

    # ------------------------------------------------------------------ the control API

    async def call(
        self, method: str, path: str, status: int = 200, **options: Any
    ) -> dict[str, Any]:
        path = f"/admin/v1/tenants/{self.tenant}{path}"
        answer = await self.stand.admin.request(method, path, **options)
        assert answer.status_code == status, (answer.status_code, answer.text)
        return dict(answer.json())

    async def builds(self, count: int) -> list[dict[str, Any]]:
        """Once the worker has noted so many."""
        found: list[dict[str, Any]] = []

        async def are_noted() -> bool:
            answer = await self.stand.admin.get("/admin/v1/engine-builds")
            found[:] = answer.json()["data"]
            return len(found) == count

        await eventually(are_noted, f"{count} builds")
        return found

    async def revision(self, status: int = 201, **content: Any) -> dict[str, Any]:
        """One more of the deployment, that does not answer yet."""
        return await self.call("POST", f"/deployments/{MODEL}/revisions", status, json=content)

    async def draft(self, canary: dict[str, Any], **gate: Any) -> dict[str, Any]:
        body = {
            "deployment": MODEL,
            "canary": canary["id"],
            "steps": [{"kind": "canary", "weight_bp": 5_000, "hold_s": 0}],
            "sticky_by": "user",
            "promotion": "approval",
            "gate": {**NO_GATES, **gate},
        }
        return await self.call("POST", "/rollouts", 201, json=body)

    async def in_canary(self, draft: dict[str, Any]) -> dict[str, Any]:
        """Started, and begun: its replicas have loaded what they need."""
        await self.call("POST", f"/rollouts/{draft['id']}/start")

        async def has_begun() -> bool:
            return (await self.rollout(draft))["state"] == "canary"

        await eventually(has_begun, "its canary step")
        return await self.rollout(draft)

    async def rollout(self, of: dict[str, Any]) -> dict[str, Any]:
        return await self.call("GET", f"/rollouts/{of['id']}")

    # ------------------------------------------------------------------ requests

    async def ask(self, user: str) -> httpx.Response:
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": f"The sea, says {user}"}],
            "user": user,
            "max_tokens": 6,
            "logprobs": True,
        }
        return await self.client.post("/v1/chat/completions", json=body)

    async def ask_all(self, users: list[str]) -> list[httpx.Response]:
        limit = asyncio.Semaphore(4)

        async def ask(user: str) -> httpx.Response:
            async with limit:
                return await self.ask(user)

        return list(await asyncio.gather(*map(ask, users)))

    async def requests(self, answers: list[httpx.Response]) -> list[Request]:
        """As the books have them, in that order."""
        await eventually(lambda: self.gateway.pumps.num_live == 0, "all have ended")
        await eventually(lambda: self.gateway.copying.num_pending == 0, "all is scored")
        ids = [parse_id("request", answer.headers["x-request-id"]) for answer in answers]
        async with self.stand.db.sessions() as session:
            found = await session.scalars(select(Request).where(Request.id.in_(ids)))
            rows = {row.id: row for row in found}
        return [rows[id_] for id_ in ids]

    async def check_books(self) -> None:
        """Once the worker has landed the journals, everything adds up to the token."""

        async def is_landed() -> bool:
            identity = (await check_invariants(self.stand.db.sessions)).identity
            return not identity.pending_requests and not identity.unlanded

        await eventually(is_landed, "the journals")
        report = await check_invariants(self.stand.db.sessions)
        assert report.ok, [check for check in report.checks if not check.ok]
        assert report.identity.difference == 0


def _said_by(answer: httpx.Response) -> list[float]:
    return [token["logprob"] for token in answer.json()["choices"][0]["logprobs"]["content"]]


def _as_real(value: float) -> float:
    [rounded] = struct.unpack("f", struct.pack("f", value))
    return float(rounded)


async def test_another_dtype_is_rolled_out_lost_promoted_and_rolled_back(
    db_url: str, redis_url: str, short_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = short_tmp_path
    model = write_model(folder / "models")
    store = f"file://{folder / 'store'}"
    scored: list[list[float]] = []
    mean_logprob = scoring.mean_logprob

    def spy(answer: Answer, num_tokens: int) -> float:
        scored.append(answer.logprobs)
        return mean_logprob(answer, num_tokens)

    monkeypatch.setattr(scoring, "mean_logprob", spy)
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context

        def engine(name: str, dtype: str) -> Any:
            flags = ("--store-url", store, "--dtype", dtype, *FLAGS)
            return start_engine(folder / name, model, redis_url, *flags, replica_id=name)

        await enter(engine("old", "float32"))
        lost = await enter(engine("new", "bfloat16"))
        settings = settings_for(db_url, redis_url, folder, model_dir=model, store_url=store)
        db = await enter(open_database(database_settings(serving_url(db_url))))
        app = create_app(settings, passwords=cheap_passwords())
        await enter(app.router.lifespan_context(app))
        # Scripted engines have no part in this: the one that a stand has is never started.
        stand = Stand(app, FakeEngine(folder), db, redis_url, folder, settings)
        world = await enter(World.beside(stand, db_url, model))
        router = world.gateway.router
        await eventually(lambda: router.num_ready == 2, "both engines", deadline_s=120)
        builds = {build["facts"]["dtype"]: build for build in await world.builds(2)}
        old, new = (builds[dtype]["fingerprint"] for dtype in ("float32", "bfloat16"))
        stable = (await deploy_adapter(stand, world.tenant, folder, model, MODEL))["revision"]
        assert stable["engine_build_id"] is None
        canary = await world.revision(
            version_id=stable["version_id"], engine_build_id=builds["bfloat16"]["id"]
        )
        gate = {
            "error_rate": SHARE,
            "logprob": {"max_drop": 20, "sample_bp": 10_000, "min_requests": 20},
        }
        draft = await world.draft(canary, **gate)
        assert (draft["changes"], draft["warnings"]) == (["engine_build"], [])
        rollout = await world.in_canary(draft)

        # Each side on its own build, and every answer says so.
        sides: dict[str, list[str]] = {"stable": [], "canary": []}
        shown: dict[str, set[str]] = {"stable": set(), "canary": set()}
        answers = await world.ask_all(USERS)
        rows = await world.requests(answers)
        num_scored = 0
        for user, answer, row in zip(USERS, answers, rows, strict=True):
            assert answer.status_code == 200, answer.text
            side = answer.headers["x-loraplex-arm"]
            assert row.arm == side
            assert row.fingerprint == (new if side == "canary" else old)
            sides[side].append(user)
            shown[side].add(answer.json()["system_fingerprint"])
            # The adapter's own answer has, told as a whole, the bits that it had token by token. One that ended
            # itself is told with its last token, which the client does not see.
            has_ended = answer.json()["choices"][0]["finish_reason"] == "stop"
            if side == "stable" and row.stable_logprob is not None:
                seen = _said_by(answer)
                [told] = [one for one in scored if one[: len(seen)] == seen]
                assert len(told) == len(seen) + has_ended
                mean = math.fsum(told) / len(told)
                assert _as_real(row.stable_logprob) == _as_real(mean)
                num_scored += 1
        assert len(shown["stable"]) == len(shown["canary"]) == 1
        assert shown["stable"] != shown["canary"]
        assert min(map(len, sides.values())) >= 3
        assert num_scored >= 3

        # The canary's only engine is lost: its subjects are refused, in words, until the gate has seen enough.
        await lost.kill()
        killed_s = time.monotonic()
        refused: list[Request] = []
        said = ""
        newcomers = (f"late-{number}" for number in itertools.count())
        while (rollout := await world.rollout(draft))["state"] == "canary":
            assert time.monotonic() - killed_s < 60, rollout["verdict"]
            answers = await world.ask_all(list(itertools.islice(newcomers, 12)))
            for answer, row in zip(answers, await world.requests(answers), strict=True):
                if row.arm == "canary":
                    assert answer.status_code == row.http_status == 503, answer.text
                    assert "retry-after" in answer.headers
                    said = answer.json()["error"]["message"]
                    refused.append(row)
                else:
                    assert answer.status_code == 200, answer.text
        print(f"aborted {time.monotonic() - killed_s:.1f} s after kill -9, {len(refused)} refused")
        assert rollout["state"] == "aborted"
        assert "error_rate" in rollout["end_reason"]
        assert len(refused) >= 20
        assert new in said
        assert not any(row.completion_tokens for row in refused)
        restored = await world.ask_all(USERS)
        assert {answer.status_code for answer in restored} == {200}
        assert {row.fingerprint for row in await world.requests(restored)} == {old}

        # It comes back with its journal: a second try goes through.
        await enter(engine("new", "bfloat16"))
        await eventually(lambda: router.num_ready == 2, "the new engine again", deadline_s=120)
        rollout = await world.in_canary(await world.draft(canary, error_rate=SHARE))
        for expected in ({old, new}, {new}, {old}):
            answers = await world.ask_all(USERS)
            assert {answer.status_code for answer in answers} == {200}
            rows = await world.requests(answers)
            assert {row.fingerprint for row in rows} == expected
            for row in rows:
                assert (row.fingerprint == new) == (str(row.revision_id) == _uuid(canary))
            verb = {2: "promote", 1: "rollback"}[len(expected)]
            if expected != {old}:
                await world.call("POST", f"/rollouts/{rollout['id']}/{verb}")
        assert (await world.rollout(rollout))["state"] == "rolled_back"
        await world.check_books()
        for client in stand.clients:
            await client.aclose()


def _uuid(revision: dict[str, Any]) -> str:
    return str(parse_id("deployment_revision", revision["id"]))


async def test_other_weights_are_a_build_and_other_tokens_are_refused(
    db_url: str, redis_url: str, short_tmp_path: Path
) -> None:
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        stand = await enter(Stand.open(db_url, redis_url, short_tmp_path))
        async with stand.db.sessions() as session:
            base = (await session.scalars(select(BaseModel))).one()
        says = {
            "base_revision": base.revision,
            "tokenizer_sha256": base.tokenizer_sha256,
            "chat_template_sha256": base.chat_template_sha256,
        }
        announce(redis_url, stand.engine, **says)
        engines = {}
        for letter, name, other in (
            ("a", "weights", {"base_revision": "sha256:" + "a" * 64}),
            ("b", "tokenizer", {"tokenizer_sha256": "b" * 64}),
            ("c", "chat_template", {"chat_template_sha256": "c" * 64}),
        ):
            engine = FakeEngine(
                short_tmp_path,
                replica_id=name,
                model_fingerprint="sha256:" + letter * 64,
                max_model_len=stand.engine.max_model_len,
                vocab_size=400,
            )
            engines[name] = await enter(engine)
            announce(redis_url, engine, **(says | other))
        world = await enter(World.beside(stand, db_url, stand.folder / "model"))
        builds = {build["fingerprint"][-1]: build for build in await world.builds(4)}
        version_id = await stand.version(world.tenant)
        await world.call("PUT", f"/deployments/{MODEL}", json={"version_id": None})

        # New weights that merely run answer nobody: no revision names them.
        await eventually(lambda: world.gateway.router.num_ready == 4, "all replicas")
        rows = await world.requests(await world.ask_all(USERS))
        assert builds["a"]["fingerprint"] not in {row.fingerprint for row in rows}

        for letter, ours in (("b", base.tokenizer_sha256), ("c", base.chat_template_sha256)):
            refused = await world.revision(
                400, version_id=None, engine_build_id=builds[letter]["id"]
            )
            error = refused["error"]
            assert error["param"] == "engine_build_id"
            assert letter * 64 in error["message"]
            assert ours in error["message"]

        weights = builds["a"]["id"]
        both = await world.revision(version_id=version_id, engine_build_id=builds["f"]["id"])
        draft = await world.draft(both, error_rate=SHARE)
        assert draft["changes"] == ["adapter", "engine_build"]
        [warning] = draft["warnings"]
        assert "2 things at once (adapter, engine_build)" in warning

        canary = await world.revision(version_id=None, engine_build_id=weights)
        assert canary["base_revision"] == "sha256:" + "a" * 64
        draft = await world.draft(canary, error_rate=SHARE)
        assert (draft["changes"], draft["warnings"]) == (["base_model"], [])
        rollout = await world.in_canary(draft)
        answers = await world.ask_all(USERS)
        rows = await world.requests(answers)
        assert {row.arm for row in rows} == {"stable", "canary"}
        asked = {UUID(sent.request_id) for sent in engines["weights"].received_of(Generate)}
        assert {row.id for row in rows if row.arm == "canary"} <= asked
        assert not asked & {row.id for row in rows if row.arm == "stable"}
        await world.call("POST", f"/rollouts/{rollout['id']}/promote")
        rows = await world.requests(await world.ask_all(USERS))
        assert {row.fingerprint for row in rows} == {builds["a"]["fingerprint"]}
