"""The process: port file, drain, refusal to start, and what it must not import."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

import httpx
import pytest
from loraplex_platform.control import main
from pydantic import SecretStr

from tests.platform.control.stand import ADMIN_KEY, settings_for, write_model

MODULE = "loraplex_platform.control.main"


def environment(db_url: str, redis_url: str, folder: Path, **changes: str) -> dict[str, str]:
    settings = settings_for(db_url, redis_url, folder)
    values = {
        f"LORAPLEX_{name.upper()}": value.get_secret_value()
        if isinstance(value, SecretStr)
        else str(value)
        for name, value in settings
        if value is not None
    }
    return {"PATH": os.environ["PATH"]} | values | changes


async def test_it_serves_on_a_free_port_drains_on_sigterm_and_returns_0(
    db_url: str, redis_url: str, short_tmp_path: Path
) -> None:
    write_model(short_tmp_path / "model")
    port_file = short_tmp_path / "control.port"
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        MODULE,
        f"--port-file={port_file}",
        env=environment(db_url, redis_url, short_tmp_path),
        stderr=PIPE,
    )
    async with asyncio.timeout(60):
        while not port_file.exists():
            assert process.returncode is None, await process.communicate()
            await asyncio.sleep(0.05)

    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port_file.read_text().strip()}") as c:
        assert (await c.get("/ready")).status_code == 200
        assert (await c.get("/admin/v1/tenants")).status_code == 401
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        assert (await c.get("/admin/v1/overview", headers=headers)).status_code == 200
    process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(30):
        _, errors = await process.communicate()

    assert process.returncode == 0, errors.decode()
    assert '"event": "control_ready"' in errors.decode()
    assert ADMIN_KEY not in errors.decode()


def test_an_answer_on_a_kept_connection_does_not_wait_for_acknowledgements() -> None:
    with main._listen("127.0.0.1", 0) as listener:
        client = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
        with client, accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


async def test_it_says_why_it_does_not_start(
    db_url: str, redis_url: str, short_tmp_path: Path
) -> None:
    write_model(short_tmp_path / "model")
    good = environment(db_url, redis_url, short_tmp_path)
    cases = [
        ({"LORAPLEX_KEY_PEPPER": "short"}, b"key_pepper"),
        ({"LORAPLEX_ADMIN_KEY": "admin"}, b"LORAPLEX_ADMIN_KEY"),
        ({"LORAPLEX_MODEL_DIR": str(short_tmp_path)}, b"models pull"),
        ({"LORAPLEX_STORE_URL": "nowhere"}, b"is not a URL"),
    ]
    processes = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-m", MODULE, env=good | changes, stderr=PIPE
        )
        for changes, _ in cases
    ]

    for process, (changes, words) in zip(processes, cases, strict=True):
        async with asyncio.timeout(60):
            _, errors = await process.communicate()
        assert process.returncode != 0
        assert words in errors, (changes, errors.decode())


@pytest.mark.parametrize(
    ("email", "password", "words"),
    [
        ("ada@example.com", None, "set both or neither"),
        (None, "correct horse battery", "set both or neither"),
        ("ada@example.com", "abcxyz", "LORAPLEX_ADMIN_PASSWORD: "),
        ("ada", "correct horse battery", "LORAPLEX_ADMIN_EMAIL: "),
    ],
)
def test_a_first_admin_who_could_not_log_in_stops_the_start_and_shows_no_password(
    tmp_path: Path, email: str | None, password: str | None, words: str
) -> None:
    settings = settings_for("postgresql://x@/y", "redis://x", tmp_path)
    given = settings.model_copy(
        update={"admin_email": email, "admin_password": password and SecretStr(password)}
    )

    with pytest.raises(main.ControlStartError, match=words) as error:
        main._check(given)

    assert password is None or password not in str(error.value)


async def test_it_imports_no_torch() -> None:
    code = (
        f"import {MODULE}, sys;"
        "print(sorted({'torch', 'transformers', 'peft', 'streamlit'} & set(sys.modules)))"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=PIPE)
    output, _ = await process.communicate()

    assert output.strip() == b"[]"
