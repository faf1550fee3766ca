"""`loraplex adapters upload|import|imports` against a control API that runs."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from loraplex_platform.admin_client import AdminApiError, AdminClient

from tests.platform.cli.test_tenancy_commands import Terminal
from tests.platform.control.stand import Stand, adapter
from tests.platform.control.test_playground import serving

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"


@pytest.fixture
async def terminal(
    _quiet_server: None,
    db_url: str,
    redis_url: str,
    short_tmp_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Terminal]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    options = {"import_sources": f"file://{tmp_path}/"}
    async with (
        Stand.open(db_url, redis_url, short_tmp_path, **options) as stand,
        serving(stand.app) as url,
    ):
        yield Terminal(stand, url)


def write(folder: Path, seed: int = 0) -> Path:
    files = adapter(seed=seed)
    folder.mkdir()
    (folder / CONFIG).write_bytes(files.config)
    (folder / TENSORS).write_bytes(files.model)
    return folder


async def test_an_upload_that_was_cut_goes_on(
    terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "capitals")
    await terminal.done("tenants", "create", "acme")
    append = AdminClient.append_bytes
    sent: list[tuple[str, int]] = []

    def cut(self: AdminClient, tenant: str, upload: str, name: str, at: int, data: object) -> int:
        sent.append((name, at))
        if name == TENSORS and at == 0:
            append(self, tenant, upload, name, at, iter([b"".join(data)[:500]]))  # type: ignore[call-overload]
            raise KeyboardInterrupt
        return append(self, tenant, upload, name, at, data)  # type: ignore[arg-type]

    monkeypatch.setattr(AdminClient, "append_bytes", cut)
    code, _, _ = await terminal.run("adapters", "upload", str(folder), "-t", "acme")
    assert code == 130
    states = list((tmp_path / "state" / "loraplex" / "uploads").iterdir())
    assert len(states) == 1

    shown = json.loads(
        await terminal.done("adapters", "upload", str(folder), "-t", "acme", "--json")
    )

    assert shown["version"]["status"] == "ready"
    assert sent == [(CONFIG, 0), (TENSORS, 0), (TENSORS, 500)], "nothing twice"
    assert list((tmp_path / "state" / "loraplex" / "uploads").iterdir()) == []


async def test_what_an_upload_will_cost_is_shown(terminal: Terminal, tmp_path: Path) -> None:
    folder = write(tmp_path / "capitals")
    await terminal.done("tenants", "create", "acme")

    shown = await terminal.done("adapters", "upload", str(folder), "-t", "acme", "--deploy", "m")

    assert "memory (bfloat16, estimated; rank 8)" in shown
    assert "overhead (estimated)" in shown
    assert "m answers with it now" in " ".join(shown.split())
    assert "capitals" in await terminal.done("adapters", "list", "-t", "acme")


async def test_a_server_that_forgot_the_upload_gets_it_anew(
    terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "capitals")
    await terminal.done("tenants", "create", "acme")

    def away(*_: object) -> dict[str, object]:
        raise AdminApiError("no engine", status=400, code="engine_away")

    with monkeypatch.context() as patch:
        patch.setattr(AdminClient, "complete_upload", away)
        await terminal.refused("adapters", "upload", str(folder), "-t", "acme")
    tenants = (await terminal.stand.admin.get("/admin/v1/tenants")).json()["data"]
    path = f"/admin/v1/tenants/{tenants[0]['id']}/adapter-uploads"
    [unfinished] = (await terminal.stand.admin.get(path)).json()["data"]
    assert (await terminal.stand.admin.delete(f"{path}/{unfinished['id']}")).status_code == 204

    await terminal.done("adapters", "upload", str(folder), "-t", "acme", "--no-probe")


async def test_imports_are_watched_listed_and_fail_with_the_reason(
    terminal: Terminal, tmp_path: Path
) -> None:
    source = f"file://{write(tmp_path / 'server')}"
    await terminal.done("tenants", "create", "acme")

    shown = await terminal.done("adapters", "import", "capitals", source, "-t", "acme")
    failed = await terminal.refused(
        "adapters", "import", "x", f"file://{tmp_path}/nothing", "-t", "acme"
    )
    foreign = await terminal.refused("adapters", "import", "x", "file:///etc/x", "-t", "acme")

    assert "version 1 is ready" in " ".join(shown.split())
    assert "is not a folder of this server" in failed
    assert "LORAPLEX_IMPORT_SOURCES" in foreign
    jobs = json.loads(await terminal.done("adapters", "imports", "-t", "acme", "--json"))
    assert [job["state"] for job in jobs] == ["failed", "succeeded"]
    assert "succeeded" in await terminal.done("adapters", "imports", "-t", "acme")
