"""The platform that the console talks to: control API, gateway and worker on real ports, with a
scripted engine, a real Postgres and a real Redis behind them.

Everything runs on an event loop in a thread of its own, so that Streamlit (which is synchronous) and
Playwright can be driven from the test.

`python -m tests.admin_ui.stand` runs one, and prints where, for looking at the console by hand.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from loraplex_admin.api import SESSION_COOKIE, Api
from loraplex_engine.protocol import Generate
from loraplex_platform.control.app import create_app
from loraplex_platform.gateway.app import open_gateway
from loraplex_platform.gateway.main import Server
from loraplex_platform.settings import WorkerSettings
from loraplex_platform.worker.app import open_worker

from tests.platform.control.stand import (
    ADMIN_KEY,
    BASE,
    AdapterFiles,
    adapter,
    announce,
    cheap_passwords,
    settings_for,
    write_model,
)
from tests.platform.gateway import stand as gateway_stand
from tests.platform.gateway import tiny_model
from tests.support.fake_engine import FakeEngine, Script
from tests.support.postgres import serving_url
from tests.support.processes import until

# Of an answer, on a machine that others keep busy.
_TIMEOUT_S = 60
PASSWORD = "correct horse battery"
BASE_ANSWER = "I am the base model. Please stop."
ADAPTER_ANSWER = "Paris is the capital of France."


@dataclass(kw_only=True)
class Platform:
    """A platform as its people reach it: control API and gateway, wherever they run.

    Attributes:
        http: the control API, with the admin key.
        apis: of everybody who has logged in, to be closed.
    """

    control_url: str
    gateway_url: str
    http: httpx.Client
    apis: list[Api] = field(default_factory=list)

    def user(self, role: str, email: str | None = None) -> str:
        """A new user; their e-mail. The password is `PASSWORD`."""
        email = email or f"{role}@example.com"
        body = {"email": email, "password": PASSWORD, "role": role}
        answer = self.http.post("/admin/v1/users", json=body)
        assert answer.status_code in {201, 409}, answer.text
        return email

    def session(self, role: str = "admin") -> str:
        """The cookie of a user of that role who is logged in."""
        body = {"email": self.user(role), "password": PASSWORD}
        with httpx.Client(base_url=self.control_url, timeout=_TIMEOUT_S) as client:
            answer = client.post("/admin/v1/sessions", json=body)
            assert answer.status_code == 201, answer.text
            return client.cookies[SESSION_COOKIE]

    def api(self, role: str = "admin") -> Api:
        """The console's client, logged in."""
        api = Api(self.control_url, self.session(role))
        self.apis.append(api)
        return api

    def member(self, tenant_id: str, role: str) -> Api:
        """The console's client of somebody who is only this in that tenant."""
        email = f"{role}-{tenant_id[-12:]}@example.org"
        invited = self.post(
            f"/tenants/{tenant_id}/invitations", json={"email": email, "role": role}
        )
        with httpx.Client(base_url=self.control_url, timeout=_TIMEOUT_S) as client:
            body = {"token": invited["token"], "password": PASSWORD}
            joined = client.post("/admin/v1/invitations/accept", json=body)
            assert joined.is_success, joined.text
            login = client.post("/admin/v1/sessions", json={"email": email, "password": PASSWORD})
            assert login.status_code == 201, login.text
            api = Api(self.control_url, client.cookies[SESSION_COOKIE])
        self.apis.append(api)
        return api

    def post(self, path: str, **options: Any) -> dict[str, Any]:
        """POST with the admin key, below /admin/v1; must succeed."""
        answer = self.http.post(f"/admin/v1{path}", **options)
        assert answer.is_success, answer.text
        return dict(answer.json())

    def read(self, path: str) -> dict[str, Any]:
        """GET with the admin key, below /admin/v1; must succeed."""
        answer = self.http.get(f"/admin/v1{path}")
        assert answer.is_success, answer.text
        return dict(answer.json())

    def tenant(self, slug: str, name: str | None = None) -> dict[str, Any]:
        """A new tenant."""
        return self.post("/tenants", json={"slug": slug} | ({"name": name} if name else {}))

    def upload(
        self,
        tenant_id: str,
        name: str,
        files: AdapterFiles | None = None,
        *,
        is_probed: bool = True,
    ) -> dict[str, Any]:
        """A new adapter."""
        files = files or adapter()
        return self.post(
            f"/tenants/{tenant_id}/adapters",
            data={"name": name, "probe": "true" if is_probed else "false"},
            files={
                "adapter_config": ("adapter_config.json", files.config),
                "adapter_model": ("adapter_model.safetensors", files.model),
            },
        )

    def deploy(self, tenant_id: str, name: str, version_id: str | None) -> dict[str, Any]:
        """A deployment."""
        path = f"/admin/v1/tenants/{tenant_id}/deployments/{name}"
        answer = self.http.put(path, json={"version_id": version_id})
        assert answer.is_success, answer.text
        return dict(answer.json())

    def ask(
        self, secret: str, model: str = BASE, text: str = "hello", user: str | None = None
    ) -> httpx.Response:
        """A request of a tenant's own, at the gateway."""
        message = {"role": "user", "content": text}
        body = {"model": model, "messages": [message], "max_tokens": 32, "user": user}
        headers = {"authorization": f"Bearer {secret}"}
        url = f"{self.gateway_url}/v1/chat/completions"
        return httpx.post(url, json=body, headers=headers, timeout=_TIMEOUT_S)


@dataclass(kw_only=True)
class Stand(Platform):
    """The platform of most tests: in a thread of the test's process, with a scripted engine."""

    engine: FakeEngine
    loop: asyncio.AbstractEventLoop
    base_script: Script = field(
        default_factory=lambda: Script(token_ids=[*tiny_model.ids_of(BASE_ANSWER), 2])
    )
    adapter_script: Script = field(
        default_factory=lambda: Script(token_ids=[*tiny_model.ids_of(ADAPTER_ANSWER), 2])
    )

    def script_for(self, request: Generate) -> Script:
        """The base says one thing, every adapter another."""
        return self.base_script if request.adapter_digest is None else self.adapter_script

    def run(self, coroutine: Any) -> Any:
        """A coroutine, on the stand's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(30)


def cookie_of(api: Api) -> str:
    """The session that a client of the stand is logged in with."""
    return str(api._http.cookies[SESSION_COOKIE])


@contextlib.asynccontextmanager
async def _serving(app: Any) -> AsyncIterator[str]:
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        app,
        loop="none",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=2,
    )
    server = Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    await until(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task
        listener.close()


@contextlib.asynccontextmanager
async def _platform(
    db_url: str, redis_url: str, folder: Path, console_url: str, *, has_engine: bool
) -> AsyncIterator[tuple[str, str, FakeEngine]]:
    async with AsyncExitStack() as stack:
        engine = FakeEngine(folder, max_model_len=tiny_model.CONTEXT_LENGTH, vocab_size=400)
        await stack.enter_async_context(engine)
        if has_engine:
            announce(redis_url, engine)
        (folder / "gateway").mkdir()
        gateway = await stack.enter_async_context(
            open_gateway(gateway_stand.settings_for(db_url, redis_url, folder / "gateway"))
        )
        gateway_url = await stack.enter_async_context(gateway_stand.serving(gateway))
        settings = settings_for(
            db_url,
            redis_url,
            folder,
            model_dir=write_model(folder / "model"),
            gateway_url=gateway_url,
            console_url=console_url,
            webhook_key="webhook-key-for-tests-0123456789abcdef",
            issuer_name="Loraplex Inc.",
            issuer_address="1 Server St|Springfield",
        )
        app = create_app(settings, passwords=cheap_passwords())
        await stack.enter_async_context(app.router.lifespan_context(app))
        worker = WorkerSettings.model_validate(
            {
                "database_url": serving_url(db_url),
                "redis_url": redis_url,
                "journal_interval_s": 0.2,
                "model_dir": folder / "model",  # evals are run by who has its tokenizer
                "base_model": BASE,
            }
        )
        await stack.enter_async_context(open_worker(worker))
        if has_engine:
            await until(lambda: gateway.router.num_ready > 0)
        yield await stack.enter_async_context(_serving(app)), gateway_url, engine


@contextmanager
def stand(
    db_url: str,
    redis_url: str,
    folder: Path,
    *,
    console_url: str = "http://127.0.0.1:8501",
    has_engine: bool = True,
) -> Iterator[Stand]:
    """Run a platform in a thread until the block ends.

    Args:
        db_url, redis_url: empty, for this stand alone.
        folder: with a short name, for sockets.
        console_url: where the login form leads to.
        has_engine: the engine has announced itself; else the fleet has none yet.
    """
    ready = threading.Event()
    box: dict[str, Any] = {}

    async def live() -> None:
        box["stop"] = asyncio.Event()
        box["loop"] = asyncio.get_running_loop()
        async with _platform(
            db_url, redis_url, folder, console_url, has_engine=has_engine
        ) as found:
            box["url"], box["gateway_url"], box["engine"] = found
            ready.set()
            await box["stop"].wait()

    def run() -> None:
        try:
            asyncio.run(live())
        except BaseException as error:  # noqa: BLE001 - raised again in the test's thread
            box["error"] = error
        finally:
            ready.set()

    # A daemon: a stand that does not end must not keep the tests from ending.
    thread = threading.Thread(target=run, name="stand", daemon=True)
    thread.start()
    ready.wait()
    try:
        if "error" in box:
            raise box["error"]
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        with httpx.Client(base_url=box["url"], headers=headers, timeout=_TIMEOUT_S) as client:
            made = Stand(
                control_url=box["url"],
                gateway_url=box["gateway_url"],
                http=client,
                engine=box["engine"],
                loop=box["loop"],
            )
            made.engine.script_for = made.script_for
            yield made
            for api in made.apis:
                api.close()
    finally:
        if "stop" in box and not box["loop"].is_closed():
            box["loop"].call_soon_threadsafe(box["stop"].set)
        thread.join(30)
    if "error" in box:
        raise box["error"]


def main() -> None:
    """Serve until Ctrl-C."""
    from loraplex_platform.local.embedded import start_redis

    from tests.support.postgres import PostgresServer

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lpx-")))
        postgres = PostgresServer(folder / "postgres")
        stack.callback(postgres.stop)
        redis = start_redis(folder / "redis")
        stack.callback(redis.stop)
        url = stack.enter_context(postgres.clone())
        made = stack.enter_context(stand(url, redis.url, folder))
        made.user("admin")
        made.user("viewer")
        print(f"control API: {made.control_url}  admin key: {ADMIN_KEY}", flush=True)
        print(f"log in as admin@example.com or viewer@example.com: {PASSWORD}", flush=True)
        signal.sigwait({signal.SIGINT, signal.SIGTERM})


if __name__ == "__main__":
    main()
