"""What of the secrets others can see: their files, and what the doctor prints."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from loraplex_engine.artifact import without_login
from loraplex_engine.urls import POSTGRES_SCHEMES, REDIS_SCHEMES, url_fault
from loraplex_platform.cli.doctor_commands import _print
from loraplex_platform.doctor.look import Look
from loraplex_platform.doctor.run import all_checks, as_json, examine
from loraplex_platform.local.data_dir import DataDir

from tests.platform.doctor.conftest import Ask

# Each with the place where a library would quote it.
LOGINS = [
    ":SECRETPW1/x@127.0.0.1:1",
    "u:SECRETPW1?x@127.0.0.1:1",
    "u:SECRETPW1#x@127.0.0.1:1",
    "u:12@SECRETPW1@127.0.0.1:1",
    "u:[SECRETPW1@127.0.0.1:1",
    "u:SECRETPW1%zz@127.0.0.1:1",
    ":SECRETPW1",
    "u:SECRETPW1@127.0.0.1:SECRETPW1",
    "u:SECRETPW1@[127.0.0.1:1",
    "u:SECRETPW1@127.0.0.1:1",
    "127.0.0.1:1/x?password=SECRETPW1",
    "127.0.0.1:1/x?passwort%zz=SECRETPW1&SECRETPW1",
]


@pytest.mark.parametrize("login", LOGINS)
async def test_no_check_prints_a_password(
    login: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def no_torch(self: Look) -> dict[str, str]:
        del self
        return {"torch_error": "not looked at"}

    monkeypatch.setattr(Look, "_inspect", no_torch)
    http = f"http://{login}"
    variables = {
        "LORAPLEX_DATABASE_URL": f"postgresql://{login}",
        "LORAPLEX_REDIS_URL": f"redis://{login}",
        "LORAPLEX_STORE_URL": f"s3://{login}",
        **{f"LORAPLEX_{name}_URL": http for name in ("GATEWAY", "CONTROL", "CONSOLE", "WORKER")},
    }
    for store in (f"s3://{login}", f"file://{login}", f"s3:/{login}", login):
        variables["LORAPLEX_STORE_URL"] = store
        checks = all_checks()
        if store[:5] != "s3://":
            checks = [check for check in checks if check.group == "store"]
        look = Look("a test", variables, DataDir(tmp_path / "data"), is_local=False)

        answers = await examine(look, checks)
        _print(look, answers)

        printed = capsys.readouterr().out + json.dumps(as_json(look, answers))
        assert "SECRETPW1" not in printed
        assert "itself failed" not in printed
    look = Look("a test", variables, DataDir(tmp_path / "data"), is_local=False)
    by_name = {one.check.name: one.finding for one in await examine(look, all_checks())}
    assert by_name["database.reachable"].status == by_name["redis.reachable"].status == "fail"


async def test_a_url_that_cannot_be_read_says_how_to_write_it(ask: Ask) -> None:
    database = await ask(
        "database.reachable", LORAPLEX_DATABASE_URL="postgresql://u:SECRET%zzPW@127.0.0.1:1/x"
    )
    redis = await ask("redis.reachable", LORAPLEX_REDIS_URL="redis://:SECRETPW1/x@127.0.0.1:1")

    assert (database.status, redis.status) == ("fail", "fail")
    assert "LORAPLEX_DATABASE_URL: its user or password has one of" in database.found
    assert "LORAPLEX_REDIS_URL: its user or password has one of" in redis.found


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:p%2Fw@db:5432/x?application_name=a@b",
        "postgres://u@[::1]:5432,other:5433/x",
        "postgresql:///x?host=/run/postgresql",
    ],
)
def test_sound_urls_of_postgres(url: str) -> None:
    assert url_fault(url, POSTGRES_SCHEMES) is None


@pytest.mark.parametrize(
    "url", ["redis://:p%40w@127.0.0.1:6379/0", "rediss://r", "unix:///run/redis.sock?db=1"]
)
def test_sound_urls_of_redis(url: str) -> None:
    assert url_fault(url, REDIS_SCHEMES) is None


def test_a_url_is_printed_without_what_could_be_a_login() -> None:
    assert without_login("s3://key:secret@bucket/path") == "s3://***@bucket/path"
    assert without_login("s3://bucket/path?key=secret") == "s3://bucket/path?***"
    assert without_login("s3://bucket?key=sec@ret") == "s3://***"
    assert without_login("file:///var/lib/store") == "file:///var/lib/store"


# ------------------------------------------------------------------------------------ files


async def test_files_of_secrets_that_others_can_read_or_write(ask: Ask, tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    folder.mkdir()
    file = folder / "loraplex_key_pepper"
    file.write_text("pepper-0123456789abcdefghijklmnop")
    found = {}
    for folder_mode, file_mode in (
        *((0o777, 0o666), (0o755, 0o666), (0o755, 0o444), (0o711, 0o604), (0o770, 0o600)),
        *((0o700, 0o444), (0o755, 0o400), (0o750, 0o640)),
    ):
        folder.chmod(folder_mode)
        file.chmod(file_mode)
        finding = await ask("secrets.closed", LORAPLEX_SECRETS_DIR=str(folder))
        found[folder_mode, file_mode] = finding.status
    folder.chmod(0o755)
    file.chmod(0o644)
    opened = await ask("secrets.closed", LORAPLEX_SECRETS_DIR=str(folder))
    gone = await ask("secrets.closed", LORAPLEX_SECRETS_DIR=str(tmp_path / "none"))

    assert list(found.values()) == [*["fail"] * 5, *["ok"] * 3], found
    assert opened.remedy == f"chmod 700 {folder}"
    assert "loraplex_key_pepper" in opened.found
    assert gone.status == "fail"


async def test_files_on_a_read_only_mount_are_as_they_should_be(
    ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As in a container of compose.yaml: /run/secrets of mode 755, each file mounted with 444.
    folder = tmp_path / "secrets"
    folder.mkdir(mode=0o755)
    (folder / "loraplex_key_pepper").write_text("pepper-0123456789abcdefghijklmnop")
    (folder / "loraplex_key_pepper").chmod(0o444)
    real = os.statvfs

    class ReadOnly:
        f_flag = real(folder).f_flag | os.ST_RDONLY

    before = await ask("secrets.closed", LORAPLEX_SECRETS_DIR=str(folder))
    monkeypatch.setattr(
        os, "statvfs", lambda path: ReadOnly if Path(path).is_file() else real(path)
    )
    mounted = await ask("secrets.closed", LORAPLEX_SECRETS_DIR=str(folder))

    assert (before.status, mounted.status) == ("fail", "ok")
