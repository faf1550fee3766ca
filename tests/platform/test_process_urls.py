"""URLs that no process can use: it ends at its start, says which setting and what to write, and never the password."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
import structlog
from loraplex_engine.server_cli import main as run_engine
from loraplex_platform.settings import WorkerSettings
from loraplex_platform.worker import main as worker_main

from tests.platform.control.stand import ADMIN_KEY, write_model
from tests.platform.gateway import tiny_model
from tests.platform.gateway.stand import BASE, add_base, deploy
from tests.support.command_tree import invoke
from tests.support.metering import PEPPER, add_customer
from tests.support.postgres import serving_url
from tests.support.processes import until

if TYPE_CHECKING:
    from loraplex_platform.db.session import Database

PASSWORD = "SECRETPW1"
STRONG = "0123456789abcdef" * 2

# Each with the password where a library would quote it.
LOGINS = [
    f":{PASSWORD}@127.0.0.1:notaport/0",
    f"u:{PASSWORD}@127.0.0.1:99999/0",
    f":{PASSWORD}/x@127.0.0.1:1",
    f"u:{PASSWORD}?x@127.0.0.1:1",
    f"u:12@{PASSWORD}@127.0.0.1:1",
    f"u:[{PASSWORD}@127.0.0.1:1",
    f"u:{PASSWORD}%zz@127.0.0.1:1",
    f":{PASSWORD}",
    f"u:{PASSWORD}@[127.0.0.1:1",
]
# Beside those of any URL: what only the server's own client can tell.
OPTIONS = {
    "postgresql": f"127.0.0.1:1/x?passwort={PASSWORD}",
    "redis": f"127.0.0.1:1/0?passwort={PASSWORD}",
}
SCHEMES = {
    "LORAPLEX_DATABASE_URL": "postgresql",
    "LORAPLEX_SERVE_DATABASE_URL": "postgresql",
    "LORAPLEX_REDIS_URL": "redis",
}
ENVIRONMENT = {
    "LORAPLEX_DATABASE_URL": "postgresql://x@127.0.0.1:1/x",
    "LORAPLEX_REDIS_URL": "redis://127.0.0.1:1/0",
    "LORAPLEX_MODEL_DIR": "/nowhere",
    "LORAPLEX_KEY_PEPPER": STRONG,
    "LORAPLEX_SALT_KEY": STRONG,
    "LORAPLEX_SESSION_KEY": STRONG,
    "LORAPLEX_ADMIN_KEY": ADMIN_KEY,
    "LORAPLEX_STORE_URL": "file:///nowhere",
    "COLUMNS": "400",
}
PROCESSES = [
    *(("gateway", name) for name in ("LORAPLEX_DATABASE_URL", "LORAPLEX_REDIS_URL")),
    *(("worker", name) for name in ("LORAPLEX_DATABASE_URL", "LORAPLEX_REDIS_URL")),
    ("migrate", "LORAPLEX_DATABASE_URL"),
    ("console", "LORAPLEX_CONTROL_URL"),
    *(
        ("control", f"LORAPLEX_{name}_URL")
        for name in ("DATABASE", "REDIS", "STORE", "GATEWAY", "CONSOLE", "CONTROL_PUBLIC")
    ),
    *(("control", f"LORAPLEX_{name}") for name in ("IMPORT_HUB_URL", "OIDC_ISSUER")),
    *(("up", name) for name in SCHEMES),
    ("tenants list", "LORAPLEX_CONTROL_URL"),  # no process, but it calls one
]


def bad_urls(scheme: str) -> Iterator[str]:
    yield from (f"{scheme}://{login}" for login in LOGINS)
    yield f"ftp://u:{PASSWORD}@127.0.0.1:1/0"
    if scheme != "s3":  # a word alone is a folder to who writes it there, and shown
        yield PASSWORD
    yield f"{scheme}:/{PASSWORD}"
    if scheme in OPTIONS:
        yield f"{scheme}://{OPTIONS[scheme]}"


# What they end with where Postgres does not answer at their start.
CODES_WITHOUT_DATABASE = {"gateway": 1, "control": 2, "migrate": 1}


@pytest.mark.parametrize(("process", "name"), PROCESSES)
def test_a_process_names_the_setting_and_the_remedy_and_ends_with_2(
    process: str, name: str, tmp_path: Path
) -> None:
    arguments = ["--data-dir", str(tmp_path / "data")] if process in ("up", "tenants list") else []
    scheme = "s3" if name == "LORAPLEX_STORE_URL" else SCHEMES.get(name, "http")
    for url in bad_urls(scheme):
        result = invoke([*process.split(), *arguments], ENVIRONMENT | {name: url})

        said = result.stdout + result.stderr
        assert result.exit_code == 2, (url, said, result.exception)
        assert PASSWORD not in said, url
        assert "Traceback" not in said
        # Of what may be a flag, its name is said first.
        named = name.removeprefix("LORAPLEX_").lower().replace("_", "-")
        (line,) = (line for line in said.splitlines() if name in line or f"--{named}" in line)
        assert re.search(
            r"write |begin with|comes no port|names no host|a bucket and a path|: use ", line
        )
    assert not (tmp_path / "data").exists()


@pytest.fixture
def process_restored() -> Iterator[None]:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    structlog.reset_defaults()
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("process_restored")
def test_an_engine_does_so_too(
    short_tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = ["--model-dir", "/m", "--journal-dir", f"{short_tmp_path}/j"]
    for url in bad_urls("redis"):
        monkeypatch.setenv("LORAPLEX_ENGINE_REDIS_URL", url)

        code = run_engine([*usual, "--address", f"ipc://{short_tmp_path}/e"])

        *_, line = capsys.readouterr().err.splitlines()
        assert code == 2
        assert line.startswith("engine: --redis-url: ")
        assert PASSWORD not in line


# ------------------------------------------------------------------------------------ processes


def start(process: str, *arguments: str, **changes: str) -> subprocess.Popen[str]:
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("LORAPLEX_")
    }
    return subprocess.Popen(
        [sys.executable, "-m", "loraplex_platform.cli", process, *arguments],
        env=environment | ENVIRONMENT | changes,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_real_process_says_it_in_one_line() -> None:
    gateway = start("gateway", LORAPLEX_REDIS_URL=f"redis://:{PASSWORD}@127.0.0.1:notaport/0")

    said = gateway.communicate(timeout=120)[0]

    assert gateway.returncode == 2
    (line,) = said.splitlines()
    assert ": LORAPLEX_REDIS_URL: after the host comes no port" in line
    assert PASSWORD not in line


# ------------------------------------------------------------------------------------ refused connections


@pytest.fixture
def refused() -> Iterator[dict[str, str]]:
    """URLs of servers that are not there, with a password."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # and does not listen
        port = bound.getsockname()[1]
        yield {
            "LORAPLEX_DATABASE_URL": f"postgresql://u:{PASSWORD}@127.0.0.1:{port}/x",
            "LORAPLEX_REDIS_URL": f"redis://:{PASSWORD}@127.0.0.1:{port}/0",
        }


@pytest.mark.slow
def test_no_process_logs_the_password_of_servers_that_are_not_there(
    refused: dict[str, str],
    short_tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    changes = refused | {
        "LORAPLEX_MODEL_DIR": str(write_model(short_tmp_path / "model")),
        "LORAPLEX_CONTROL_PORT": "0",
        "LORAPLEX_GATEWAY_PORT": "0",
    }
    started = [(start(name, **changes), code) for name, code in CODES_WITHOUT_DATABASE.items()]
    monkeypatch.setattr(worker_main, "PATIENCE_S", 0.0)
    for name, url in refused.items():
        monkeypatch.setenv(name, url)

    worker_code = worker_main.run(WorkerSettings())  # type: ignore[call-arg] # from the environment

    answers = [("worker", worker_code, 2, capfd.readouterr().err)]
    for process, code in started:
        said = process.communicate(timeout=120)[0]
        answers.append((str(process.args), process.returncode, code, said))
    for name, found, code, said in answers:
        assert found == code, (name, said)
        assert "The database is not available" in said
        assert "Traceback" not in said, name
        assert PASSWORD not in said


async def test_a_gateway_that_serves_without_redis_logs_no_password(
    refused: dict[str, str], db: Database, db_url: str, short_tmp_path: Path
) -> None:
    customer = await add_customer(db)
    await deploy(db, await add_base(db), None, BASE)
    port_file = short_tmp_path / "port"
    gateway = start(
        "gateway",
        *("--port", "0", "--port-file", str(port_file)),
        LORAPLEX_DATABASE_URL=serving_url(db_url),
        LORAPLEX_REDIS_URL=refused["LORAPLEX_REDIS_URL"],
        LORAPLEX_MODEL_DIR=str(tiny_model.write(short_tmp_path / "model")),
        LORAPLEX_BASE_MODEL=BASE,
        LORAPLEX_KEY_PEPPER=PEPPER.get_secret_value(),
    )
    try:
        await until(port_file.exists, deadline_s=120)
        async with httpx.AsyncClient(timeout=60) as client:
            answer = await client.post(
                f"http://127.0.0.1:{port_file.read_text().strip()}/v1/completions",
                headers={"authorization": f"Bearer {customer.secret}"},
                json={"model": BASE, "prompt": "hello"},
            )
    finally:
        gateway.terminate()
        said = gateway.communicate(timeout=60)[0]

    assert answer.status_code == 503  # there is no engine
    assert "redis_unavailable" in said
    assert PASSWORD not in said + answer.text
