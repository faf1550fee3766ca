"""Imports: from where they may come, what they become, and that no fault of a place or a process loses one."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from loraplex_platform.registry import imports
from loraplex_platform.registry.imports import ImportTimes
from loraplex_platform.registry.sources.rules import ImportRules
from sqlalchemy import text

from tests.platform.control.people import member
from tests.platform.control.stand import AdapterFiles, Stand, adapter, error_of
from tests.support.hub_server import HubServer
from tests.support.s3_server import s3_server

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
QUICK = {"poll_s": 0.05, "beat_s": 0.1, "backoff_s": (0.05,), "lease": timedelta(seconds=5)}


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer() as opened:
        yield opened


@pytest.fixture
def roots(tmp_path: Path) -> Path:
    folder = tmp_path / "roots"
    folder.mkdir()
    return folder


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    class QuickTimes(ImportTimes):
        def __init__(self, **values: Any) -> None:
            super().__init__(**QUICK | values)  # type: ignore[arg-type]

    monkeypatch.setattr("loraplex_platform.control.app.ImportTimes", QuickTimes)


@pytest.fixture
async def stand(
    db_url: str, redis_url: str, short_tmp_path: Path, hub: HubServer, roots: Path
) -> AsyncIterator[Stand]:
    options = {
        "import_sources": f"hf://,file://{roots}/{{tenant}}/,file://{roots}/shared/",
        "import_hub_url": hub.url,
        "max_adapter_bytes": 1 << 20,
    }
    async with Stand.open(db_url, redis_url, short_tmp_path, **options) as opened:
        yield opened


def parts(files: AdapterFiles) -> dict[str, bytes]:
    return {CONFIG: files.config, TENSORS: files.model}


def write(folder: Path, files: AdapterFiles) -> str:
    folder.mkdir(parents=True)
    for name, data in parts(files).items():
        (folder / name).write_bytes(data)
    return f"file://{folder}"


async def begin(stand: Stand, tenant_id: str, source: str, **body: Any) -> dict[str, Any]:
    answer = await stand.admin.post(
        f"/admin/v1/tenants/{tenant_id}/adapters/import",
        json={"name": "capitals", "source": source} | body,
    )
    assert answer.status_code == 202, answer.text
    return dict(answer.json())


async def ended(stand: Stand, tenant_id: str, job: dict[str, Any]) -> dict[str, Any]:
    path = f"/admin/v1/tenants/{tenant_id}/adapter-imports/{job['id']}"
    async with asyncio.timeout(60):
        while job["state"] in ("queued", "running"):
            await asyncio.sleep(0.05)
            job = (await stand.admin.get(path)).json()
    return job


async def run(stand: Stand, tenant_id: str, source: str, **body: Any) -> dict[str, Any]:
    return await ended(stand, tenant_id, await begin(stand, tenant_id, source, **body))


async def report_of(stand: Stand, tenant_id: str, version_id: str) -> dict[str, Any]:
    adapters = (await stand.admin.get(f"/admin/v1/tenants/{tenant_id}/adapters")).json()["data"]
    found = [v for a in adapters for v in a["versions"] if v["id"] == version_id]
    return dict(found[0])


async def test_a_folder_of_the_server_becomes_a_version(stand: Stand, roots: Path) -> None:
    tenant_id = (await stand.tenant("acme"))["id"]
    files = adapter()
    source = write(roots / "acme" / "capitals", files)

    job = await run(stand, tenant_id, source)

    assert job["state"] == "succeeded", job
    assert job["error"] is None
    assert job["received_bytes"] == job["total_bytes"] == len(files.config) + len(files.model)
    version = await report_of(stand, tenant_id, job["version_id"])
    assert version["report"]["source"] == source
    assert version["report"]["probe"] is not None, "probed like any other"
    whole = await stand.upload(tenant_id, "capitals", files)
    assert whole.json()["version"]["id"] == job["version_id"]


async def test_a_hubs_repository_is_pinned_to_its_commit(stand: Stand, hub: HubServer) -> None:
    tenant_id = (await stand.tenant("acme"))["id"]
    files = adapter()
    commit = hub.add("acme/capitals", parts(files) | {"README.md": b"x"}, revision="v1.0")

    job = await run(stand, tenant_id, "hf://acme/capitals@v1.0")

    assert job["state"] == "succeeded", job
    assert job["resolved"] == f"hf://acme/capitals@{commit}"
    version = await report_of(stand, tenant_id, job["version_id"])
    assert version["report"]["source"] == f"hf://acme/capitals@{commit}"
    downloads = [path for path, _ in hub.asked if "/resolve/" in path]
    assert len(downloads) == 2
    assert all(commit in path for path in downloads), "never by a name that may move"
    assert not any("authorization" in headers for _, headers in hub.asked)


async def test_an_adapter_in_a_folder_of_a_repository(stand: Stand, hub: HubServer) -> None:
    tenant_id = (await stand.tenant("acme"))["id"]
    inner = {f"out/last/{name}": data for name, data in parts(adapter()).items()}
    commit = hub.add("acme/many", inner | {"adapter_model.bin": b"pickle"})

    job = await run(stand, tenant_id, f"hf://acme/many@{commit}/out/last", probe=False)

    assert job["state"] == "succeeded", job
    assert job["resolved"] == f"hf://acme/many@{commit}/out/last"


async def test_pickles_are_refused_without_reading_a_byte(
    stand: Stand, hub: HubServer, roots: Path
) -> None:
    tenant_id = (await stand.tenant("acme"))["id"]
    files = adapter()
    hub.add("acme/pickled", {CONFIG: files.config, "adapter_model.bin": b"cos\nsystem"})
    folder = roots / "acme" / "pickled"
    folder.mkdir(parents=True)
    (folder / CONFIG).write_bytes(files.config)
    (folder / "adapter_model.bin").write_bytes(b"cos\nsystem")

    jobs = [
        await run(stand, tenant_id, source)
        for source in ("hf://acme/pickled", f"file://{folder}", "hf://acme/nothing")
    ]

    assert {(job["state"], job["error"]["code"]) for job in jobs} == {
        ("failed", "adapter_rejected")
    }
    assert "pickles are never opened" in jobs[0]["error"]["message"]
    assert "pickles are never opened" in jobs[1]["error"]["message"]
    assert "acme/nothing" in jobs[2]["error"]["message"]
    assert not any("/resolve/" in path for path, _ in hub.asked)


async def test_what_is_too_large_is_refused_before_it_is_fetched(
    stand: Stand, hub: HubServer
) -> None:
    tenant_id = (await stand.tenant("acme"))["id"]
    hub.add("acme/huge", {CONFIG: b"{}", TENSORS: b"x" * ((1 << 20) + 1)})

    job = await run(stand, tenant_id, "hf://acme/huge")

    assert (job["state"], job["error"]["code"]) == ("failed", "request_too_large")
    assert job["received_bytes"] == 0
    assert not any("/resolve/" in path for path, _ in hub.asked)


@pytest.mark.parametrize(
    "location",
    [
        "http://169.254.169.254/latest/meta-data",
        "https://internal.example/x",
        "https://evilhuggingface.co/x",
        "file:///etc/passwd",
        "https://hf.co:8443/x",
    ],
)
async def test_a_redirect_to_any_other_host_is_refused(
    stand: Stand, hub: HubServer, location: str
) -> None:
    tenant_id = (await stand.tenant("acme"))["id"]
    commit = hub.add("acme/capitals", parts(adapter()))
    hub.redirects[f"/acme/capitals/resolve/{commit}/{TENSORS}"] = location

    job = await run(stand, tenant_id, "hf://acme/capitals")

    assert (job["state"], job["error"]["code"]) == ("failed", "adapter_rejected")
    assert "not among its hosts" in job["error"]["message"]


async def test_a_redirect_within_the_hub_is_followed_and_circles_end(
    stand: Stand, hub: HubServer
) -> None:
    tenant_id = (await stand.tenant("acme"))["id"]
    commit = hub.add("acme/new", parts(adapter()))
    old = f"/acme/old/resolve/{commit}/{TENSORS}"
    hub.redirects["/api/models/acme/old/revision/main"] = (
        "/api/models/acme/new/revision/main?blobs=true"
    )
    hub.redirects[old] = f"/acme/new/resolve/{commit}/{TENSORS}"
    hub.redirects[f"/acme/old/resolve/{commit}/{CONFIG}"] = f"/acme/new/resolve/{commit}/{CONFIG}"
    assert (await run(stand, tenant_id, "hf://acme/old"))["state"] == "succeeded"
    hub.redirects[old] = old

    job = await run(stand, tenant_id, "hf://acme/old", name="again")

    assert (job["state"], job["attempts"]) == ("failed", imports.MAX_ATTEMPTS)
    assert "in circles" in job["error"]["message"]


async def test_a_cut_transfer_is_tried_again(stand: Stand, hub: HubServer) -> None:
    tenant_id = (await stand.tenant("acme"))["id"]
    hub.add("acme/capitals", parts(adapter()))
    hub.cut_after = 100

    job = await run(stand, tenant_id, "hf://acme/capitals")

    assert (job["state"], job["attempts"]) == ("succeeded", 2), job


async def test_a_hub_that_stays_away_is_a_reason(stand: Stand, hub: HubServer) -> None:
    tenant_id = (await stand.tenant("acme"))["id"]
    hub.status = 503

    job = await run(stand, tenant_id, "hf://acme/capitals")

    assert (job["state"], job["attempts"]) == ("failed", imports.MAX_ATTEMPTS)
    assert job["error"]["code"] == "source_unavailable"
    assert "503" in job["error"]["message"]


async def test_no_link_leads_out_of_the_root(stand: Stand, roots: Path, tmp_path: Path) -> None:
    tenant_id = (await stand.tenant("acme"))["id"]
    secret = tmp_path / "secret"
    write(secret, adapter())
    (roots / "acme").mkdir()
    (roots / "acme" / "link").symlink_to(secret)
    (roots / "acme" / "files").mkdir()
    for name in (CONFIG, TENSORS):
        (roots / "acme" / "files" / name).symlink_to(secret / name)

    jobs = [
        await run(stand, tenant_id, f"file://{roots}/acme/{name}") for name in ("link", "files")
    ]

    assert {(job["state"], job["error"]["code"]) for job in jobs} == {
        ("failed", "adapter_rejected")
    }


@pytest.mark.parametrize(
    ("source", "status", "code"),
    [
        ("file:///etc/passwd", 403, "source_not_allowed"),
        ("s3://bucket/x", 403, "source_not_allowed"),
        ("file://ROOTS/acme/../globex/x", 400, "invalid_request"),
        ("file://ROOTS/acme/%2e%2e/x", 400, "invalid_request"),
        ("file://ROOTS/acmeother/x", 403, "source_not_allowed"),
        ("http://169.254.169.254/x", 400, "invalid_request"),
        ("hf://acme", 400, "invalid_request"),
        ("hf://acme/x@../../y", 400, "invalid_request"),
        ("hf://acme/x?y=z", 400, "invalid_request"),
        ("s3://bucket/*", 400, "invalid_request"),
        ("capitals", 400, "invalid_request"),
    ],
)
async def test_other_places_are_refused_at_once(
    stand: Stand, roots: Path, source: str, status: int, code: str
) -> None:
    tenant_id = (await stand.tenant("acme"))["id"]

    answer = await stand.admin.post(
        f"/admin/v1/tenants/{tenant_id}/adapters/import",
        json={"name": "x", "source": source.replace("ROOTS", str(roots))},
    )

    assert error_of(answer, status, code)["param"] == "source"


async def test_a_tenants_people_import_from_their_own_place_only(
    stand: Stand, roots: Path, hub: HubServer
) -> None:
    acme, globex = [(await stand.tenant(slug))["id"] for slug in ("acme", "globex")]
    developer = await member(stand, acme, "developer", "dev@acme.example")
    own = write(roots / "acme" / "a", adapter())
    theirs = write(roots / "globex" / "a", adapter(seed=1))
    shared = write(roots / "shared" / "a", adapter(seed=2))
    hub.add("acme/capitals", parts(adapter(seed=3)))
    path = f"/admin/v1/tenants/{acme}/adapters/import"

    def body(source: str) -> dict[str, str]:
        return {"name": "x", "source": source}

    allowed = [
        await developer.post(path, json=body(source)) for source in (own, "hf://acme/capitals")
    ]
    refused = [await developer.post(path, json=body(source)) for source in (theirs, shared)]
    as_operator = await stand.admin.post(path, json=body(shared))

    assert [answer.status_code for answer in allowed] == [202, 202], allowed[0].text
    for answer in refused:
        error_of(answer, 403, "source_not_allowed")
    assert as_operator.status_code == 202
    job = await ended(stand, acme, as_operator.json())
    assert job["state"] == "succeeded", job
    other = await stand.admin.get(f"/admin/v1/tenants/{globex}/adapter-imports/{job['id']}")
    error_of(other, 404, "not_found")


async def test_a_job_whose_process_died_is_taken_over(
    stand: Stand, hub: HubServer, roots: Path
) -> None:
    tenant_id = (await stand.tenant("acme"))["id"]
    source = write(roots / "acme" / "a", adapter())
    context = stand.app.state.context
    await _insert_dead(stand, tenant_id, source, attempts=1)
    await _insert_dead(stand, tenant_id, source, attempts=imports.MAX_ATTEMPTS, name="killer")

    context.imports.wake()
    path = f"/admin/v1/tenants/{tenant_id}/adapter-imports"
    jobs = {}
    for shown in (await stand.admin.get(path)).json()["data"]:
        jobs[shown["name"]] = await ended(stand, tenant_id, shown)

    assert (jobs["capitals"]["state"], jobs["capitals"]["attempts"]) == ("succeeded", 2)
    assert jobs["killer"]["state"] == "failed"
    assert jobs["killer"]["error"]["code"] == "import_given_up"


async def _insert_dead(
    stand: Stand, tenant_id: str, source: str, *, attempts: int, name: str = "capitals"
) -> None:
    """A running job whose lease ran out: what a kill -9 leaves."""
    from uuid import UUID

    from loraplex_platform.ids import uuid7

    async with stand.db.transaction() as session:
        await session.execute(
            text(
                "insert into adapter_imports (id, tenant_id, name, source, is_probed, state, attempts,"
                " lease_token, lease_until, actor_kind) values (:id, :tenant, :name, :source, false,"
                " 'running', :attempts, :token, now() - interval '1 second', 'admin_key')"
            ),
            {
                "id": uuid7(),
                "tenant": UUID(hex=tenant_id.removeprefix("ten_")),
                "name": name,
                "source": source,
                "attempts": attempts,
                "token": uuid7(),
            },
        )


async def test_a_job_whose_tenant_is_deleted_ends_and_leaves_nothing(
    stand: Stand, hub: HubServer
) -> None:
    tenant_id = (await stand.tenant("acme"))["id"]
    hub.add("acme/capitals", parts(adapter()))
    hub.stops_after = 50
    await begin(stand, tenant_id, "hf://acme/capitals")
    assert await asyncio.to_thread(hub.is_stopped.wait, 20)

    gone = await stand.admin.delete(f"/admin/v1/tenants/{tenant_id}", params={"confirm": "acme"})
    hub.go_on.set()
    hub.stops_after = None

    assert gone.status_code == 200, gone.text
    other_id = (await stand.tenant("globex"))["id"]
    assert (await run(stand, other_id, "hf://acme/capitals"))["state"] == "succeeded"
    async with stand.db.transaction() as session:
        rows = await session.execute(text("select tenant_id::text from adapter_versions"))
        tenants = {row[0].replace("-", "") for row in rows}
    assert tenants == {other_id.removeprefix("ten_")}


async def test_what_changed_while_it_was_read_is_no_version(
    stand: Stand, roots: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenant_id = (await stand.tenant("acme"))["id"]
    folder = roots / "acme" / "a"
    source = write(folder, adapter())
    from loraplex_platform.registry.sources.local import FolderSource

    look = FolderSource.look

    def look_then_change(self: FolderSource, max_model_bytes: int) -> Any:
        listing = look(self, max_model_bytes)
        (folder / TENSORS).write_bytes(b"shorter")
        return listing

    monkeypatch.setattr(FolderSource, "look", look_then_change)

    job = await run(stand, tenant_id, source)

    assert (job["state"], job["error"]["code"]) == ("failed", "adapter_rejected")
    assert "changed while it was read" in job["error"]["message"]
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("ftp://x/", "begin it with one of"),
        ("s3://bucket", "end it with '/'"),
        ("s3://{tenant}/", "name a bucket"),
        ("file:///", "absolute"),
        ("file://host/x/", "absolute"),
        ("s3://b/x-{tenant}/", "whole part"),
    ],
)
def test_a_prefix_that_is_not_safe_stops_the_start(setting: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ImportRules.parse(setting, has_hub_token=False)


async def test_with_a_token_of_the_operators_the_hub_is_the_operators(
    db_url: str, redis_url: str, short_tmp_path: Path, hub: HubServer
) -> None:
    options = {
        "import_sources": "hf://",
        "import_hub_url": hub.url,
        "import_hub_token": "hf_secret",
    }
    hub.add("acme/private", parts(adapter()))
    async with Stand.open(db_url, redis_url, short_tmp_path, **options) as stand:
        tenant_id = (await stand.tenant("acme"))["id"]
        developer = await member(stand, tenant_id, "developer", "dev@acme.example")
        body = {"name": "x", "source": "hf://acme/private"}
        path = f"/admin/v1/tenants/{tenant_id}/adapters/import"

        error_of(await developer.post(path, json=body), 403, "source_not_allowed")
        job = await run(stand, tenant_id, "hf://acme/private")

    assert job["state"] == "succeeded", job
    assert {headers.get("authorization") for _, headers in hub.asked} == {"Bearer hf_secret"}


async def test_a_folder_of_a_bucket_and_a_store_in_one(
    db_url: str, redis_url: str, short_tmp_path: Path
) -> None:
    """Imported from S3, stored in S3, and refused a store that is away with a reason and a retry."""
    pytest.importorskip("s3fs")
    import fsspec

    files = adapter()
    with s3_server() as s3:
        remote = fsspec.filesystem("s3", skip_instance_cache=True)
        for name, data in parts(files).items():
            remote.pipe_file(f"{s3.bucket}/in/acme/a/{name}", data)
        options = {
            "import_sources": f"s3://{s3.bucket}/in/{{tenant}}/",
            "store_url": f"s3://{s3.bucket}/store",
            "quarantine_dir": short_tmp_path / "quarantine",
        }
        async with Stand.open(db_url, redis_url, short_tmp_path, **options) as stand:
            tenant_id = (await stand.tenant("acme"))["id"]
            source = f"s3://{s3.bucket}/in/acme/a"
            job = await run(stand, tenant_id, source, probe=False)
            missing = await run(stand, tenant_id, f"{source}-not", probe=False)
            assert (await stand.client(None).get("/ready")).json()["adapter_store"] == "ok"
            s3.stop()
            watch = stand.app.state.context.store_watch
            await watch.look()
            ready = await stand.client(None).get("/ready")
            assert (ready.status_code, ready.json()["adapter_store"]) == (200, "unavailable")
            away = await stand.upload(tenant_id, "late", adapter(seed=9), data={"probe": "false"})

        assert job["state"] == "succeeded", job
        assert job["resolved"] == source
        assert (missing["state"], missing["error"]["code"]) == ("failed", "adapter_rejected")
        error_of(away, 503, "store_unavailable")
        assert away.headers["retry-after"] == "10"
