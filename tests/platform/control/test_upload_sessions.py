"""Resumable uploads: cut anywhere and resumed, one writer, bounded, and never telling who else has what."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import random
import threading
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import pytest
from loraplex_platform.errors import EngineUnavailableError
from loraplex_platform.ids import parse_id, uuid7
from loraplex_platform.registry import upload_files, upload_routes, upload_sessions
from loraplex_platform.registry.probe import Prober
from loraplex_platform.registry.upload_files import UploadFolders
from sqlalchemy import text

from tests.platform.control.stand import AdapterFiles, Stand, adapter, error_of

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
BYTES = {"content-type": "application/offset+octet-stream"}


def path_of(tenant_id: str) -> str:
    return f"/admin/v1/tenants/{tenant_id}/adapter-uploads"


def body_for(sent: AdapterFiles, name: str = "capitals", **changes: Any) -> dict[str, Any]:
    parts = {CONFIG: sent.config, TENSORS: sent.model}
    return {
        "name": name,
        "files": [
            {"name": n, "size_bytes": len(d), "sha256": hashlib.sha256(d).hexdigest()}
            for n, d in parts.items()
        ],
    } | changes


async def begin(stand: Stand, tenant_id: str, files: AdapterFiles, **changes: Any) -> str:
    answer = await stand.admin.post(path_of(tenant_id), json=body_for(files, **changes))
    assert answer.status_code == 201, answer.text
    return f"{path_of(tenant_id)}/{answer.json()['id']}"


async def send(
    stand: Stand, upload: str, name: str, offset: int, data: bytes | AsyncIterator[bytes]
) -> httpx.Response:
    headers = BYTES | {"upload-offset": str(offset)}
    return await stand.admin.patch(f"{upload}/files/{name}", content=data, headers=headers)


async def send_all(stand: Stand, upload: str, files: AdapterFiles) -> None:
    for name, data in ((CONFIG, files.config), (TENSORS, files.model)):
        answer = await send(stand, upload, name, 0, data)
        assert answer.status_code == 204, answer.text


async def offset_of(stand: Stand, upload: str, name: str) -> int:
    answer = await stand.admin.head(f"{upload}/files/{name}")
    assert answer.status_code == 204
    assert answer.content == b""
    return int(answer.headers["upload-offset"])


async def test_it_becomes_what_an_upload_in_one_piece_becomes(stand: Stand) -> None:
    tenant_id = (await stand.tenant("acme"))["id"]
    files = adapter()
    upload = await begin(stand, tenant_id, files)
    await send_all(stand, upload, files)

    made = await stand.admin.post(f"{upload}/complete")

    assert made.status_code == 201, made.text
    whole = await stand.upload(tenant_id, "capitals", files)
    assert whole.status_code == 200
    assert whole.json() == made.json(), "the same version and report"
    again = await stand.admin.post(f"{upload}/complete")
    assert (again.status_code, again.json()) == (200, made.json())
    shown = (await stand.admin.get(upload)).json()
    assert shown["state"] == "completed"
    assert shown["version_id"] == made.json()["version"]["id"]
    assert not list((stand.folder / "store" / "quarantine" / "uploads").iterdir())
    error_of(await send(stand, upload, CONFIG, 0, b"x"), 409, "upload_ended")


async def test_cut_at_any_byte_and_resumed_it_is_the_same_adapter(stand: Stand) -> None:
    tenant_id = (await stand.tenant("acme"))["id"]
    files = adapter()
    order = random.Random(7)
    for round_ in range(3):
        upload = await begin(stand, tenant_id, files, name=f"cut-{round_}", probe=False)
        for name, data in ((CONFIG, files.config), (TENSORS, files.model)):
            cuts = sorted(order.sample(range(len(data) + 1), 12))
            for end in [*cuts, len(data)]:
                at = await offset_of(stand, upload, name)
                answer = await send(stand, upload, name, at, data[at:end])
                assert answer.status_code == 204, answer.text
                assert int(answer.headers["upload-offset"]) == end
        made = await stand.admin.post(f"{upload}/complete")

        assert made.status_code == 201, made.text
        digests = {made.json()["version"]["digest"]}
    assert len(digests) == 1


async def test_what_came_of_a_request_that_was_cut_is_kept(stand: Stand) -> None:
    tenant_id = (await stand.tenant("acme"))["id"]
    files = adapter()
    upload = await begin(stand, tenant_id, files)

    async def cut() -> AsyncIterator[bytes]:
        yield files.model[:1000]
        yield files.model[1000:3001]
        raise ConnectionError("cut")

    assert (await send(stand, upload, TENSORS, 0, cut())).is_error

    assert await offset_of(stand, upload, TENSORS) == 3001
    wrong = await send(stand, upload, TENSORS, 0, files.model)
    error_of(wrong, 409, "wrong_offset")
    assert wrong.headers["upload-offset"] == "3001"
    assert (await send(stand, upload, TENSORS, 3001, files.model[3001:])).status_code == 204
    assert (await send(stand, upload, CONFIG, 0, files.config)).status_code == 204
    assert (await stand.admin.post(f"{upload}/complete")).status_code == 201


async def test_a_connection_that_died_without_a_word_frees_the_upload(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload_routes, "BODY_IDLE_S", 0.1)
    tenant_id = (await stand.tenant("acme"))["id"]
    files = adapter()
    upload = await begin(stand, tenant_id, files)

    async def silent() -> AsyncIterator[bytes]:
        yield files.model[:100]
        await asyncio.Event().wait()

    error_of(await send(stand, upload, TENSORS, 0, silent()), 400, "upload_cut")

    assert await offset_of(stand, upload, TENSORS) == 100
    assert (await send(stand, upload, TENSORS, 100, files.model[100:])).status_code == 204


async def test_one_request_at_a_time_works_on_an_upload(stand: Stand) -> None:
    tenant_id = (await stand.tenant("acme"))["id"]
    files = adapter()
    upload = await begin(stand, tenant_id, files)
    began, go_on = asyncio.Event(), asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield files.model[:10]
        began.set()
        await go_on.wait()
        yield files.model[10:]

    first = asyncio.create_task(send(stand, upload, TENSORS, 0, slow()))
    await began.wait()
    busy = [
        await send(stand, upload, TENSORS, 0, files.model),
        await send(stand, upload, CONFIG, 0, files.config),
        await stand.admin.post(f"{upload}/complete"),
    ]
    go_on.set()

    for answer in busy:
        error_of(answer, 409, "upload_busy")
        assert answer.headers["retry-after"] == "1"
    assert (await first).status_code == 204
    assert await offset_of(stand, upload, TENSORS) == len(files.model)


async def test_a_write_that_is_cut_short_ends_before_its_file_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of a closed file is soon another file's, and would be written to."""
    folders = UploadFolders(tmp_path)
    upload_id = uuid7()
    folders.make(upload_id, 1)
    data = random.Random(0).randbytes(4 << 20)
    is_writing, go_on = threading.Event(), threading.Event()
    write, close = os.write, os.close
    done: list[str] = []

    def slow(descriptor: int, piece: bytes) -> int:
        is_writing.set()
        assert go_on.wait(30)
        count = write(descriptor, piece)
        done.append("written")
        return count

    def noted_close(descriptor: int) -> None:
        done.append("closed")
        close(descriptor)

    async def chunks() -> AsyncIterator[bytes]:
        yield data[: 2 << 20]
        yield data[2 << 20 :]

    with folders.locked(upload_id) as upload:
        with monkeypatch.context() as patch:
            patch.setattr(upload_files.os, "write", slow)
            patch.setattr(upload_files.os, "close", noted_close)
            appending = asyncio.create_task(upload.append(TENSORS, chunks(), size_bytes=len(data)))
            assert await asyncio.to_thread(is_writing.wait, 30)
            for _ in range(2):
                appending.cancel()
                await asyncio.sleep(0.1)
            assert (appending.done(), done) == (False, [])
            go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await appending
        assert done == ["written", "closed"]
        kept = (upload.folder / TENSORS).read_bytes()
    assert kept == data[: 2 << 20]


async def test_what_is_missing_or_changed_makes_no_version(stand: Stand) -> None:
    tenant_id = (await stand.tenant("acme"))["id"]
    files = adapter()
    upload = await begin(stand, tenant_id, files)
    assert (await send(stand, upload, CONFIG, 0, files.config)).status_code == 204
    assert (await send(stand, upload, TENSORS, 0, files.model[:-1])).status_code == 204
    error_of(await stand.admin.post(f"{upload}/complete"), 409, "upload_incomplete")
    changed = bytes([files.model[-1] ^ 1])
    assert (await send(stand, upload, TENSORS, len(files.model) - 1, changed)).status_code == 204

    refused = await stand.admin.post(f"{upload}/complete")

    assert error_of(refused, 400, "adapter_rejected")["param"] == TENSORS
    again = await stand.admin.post(f"{upload}/complete")
    assert again.json() == refused.json(), "told again, not tried again"
    shown = (await stand.admin.get(upload)).json()
    assert shown["state"] == "refused"
    assert shown["error"]["message"] == refused.json()["error"]["message"]


async def test_without_an_engine_it_waits_and_is_completed_later(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenant_id = (await stand.tenant("acme"))["id"]
    files = adapter()
    upload = await begin(stand, tenant_id, files)
    await send_all(stand, upload, files)

    async def no_engine(*_: object) -> None:
        raise EngineUnavailableError("No engine is ready.", retry_after_s=5)

    with monkeypatch.context() as patch:
        patch.setattr(Prober, "find_engine", no_engine)
        away = await stand.admin.post(f"{upload}/complete")

    error_of(away, 503, "engine_unavailable")
    assert (await stand.admin.get(upload)).json()["state"] == "open"
    made = await stand.admin.post(f"{upload}/complete")
    assert made.status_code == 201, made.text


@pytest.mark.parametrize(
    ("changes", "status", "code", "param"),
    [
        ({"name": "../x"}, 400, "invalid_request", "name"),
        ({"files": []}, 400, "invalid_request", "files"),
        (
            {"files": [{"name": "adapter_model.bin", "size_bytes": 5}]},
            400,
            "adapter_rejected",
            "files.0.name",
        ),
        ({"files": [{"name": CONFIG, "size_bytes": 5}] * 2}, 400, "invalid_request", "files"),
        (
            {"files": [{"name": CONFIG, "size_bytes": 2 << 20}]},
            413,
            "request_too_large",
            "files.0.size_bytes",
        ),
        (
            {"files": [{"name": TENSORS, "size_bytes": 1 << 39}]},
            413,
            "request_too_large",
            "files.0.size_bytes",
        ),
        (
            {"files": [{"name": CONFIG, "size_bytes": 5, "sha256": "x"}]},
            400,
            "invalid_request",
            "files.0.sha256",
        ),
        ({"tokenizer_sha256": "A" * 64}, 400, "invalid_request", "tokenizer_sha256"),
    ],
)
async def test_bad_plans_are_refused_by_field(
    stand: Stand, changes: dict[str, Any], status: int, code: str, param: str
) -> None:
    tenant_id = (await stand.tenant("acme"))["id"]

    answer = await stand.admin.post(path_of(tenant_id), json=body_for(adapter(), **changes))

    assert error_of(answer, status, code)["param"] == param


async def test_bad_pieces_are_refused_by_field(stand: Stand) -> None:
    tenant_id = (await stand.tenant("acme"))["id"]
    files = adapter()
    upload = await begin(stand, tenant_id, files)
    place = f"{upload}/files/{CONFIG}"

    answers = [
        await stand.admin.patch(place, content=b"x", headers={"upload-offset": "0"}),
        await stand.admin.patch(place, content=b"x", headers=BYTES),
        await stand.admin.patch(place, content=b"x", headers=BYTES | {"upload-offset": "-1"}),
    ]

    params = [error_of(answer, 400, "invalid_request")["param"] for answer in answers]
    assert params == ["Content-Type", "Upload-Offset", "Upload-Offset"]
    too_long = await send(stand, upload, CONFIG, 0, files.config + b"x")
    error_of(too_long, 413, "request_too_large")
    error_of(await send(stand, upload, "x.bin", 0, b"x"), 404, "not_found")
    error_of(await stand.admin.get(f"{path_of(tenant_id)}/upl_{'0' * 32}"), 404, "not_found")


async def test_it_expires_is_swept_and_counts_until_then(
    db_url: str, redis_url: str, short_tmp_path: Path
) -> None:
    async with Stand.open(db_url, redis_url, short_tmp_path, max_open_uploads=2) as stand:
        tenant_id = (await stand.tenant("acme"))["id"]
        other_id = (await stand.tenant("globex"))["id"]
        files = adapter()
        first, second = [await begin(stand, tenant_id, files) for _ in range(2)]
        full = await stand.admin.post(path_of(tenant_id), json=body_for(files))
        error_of(full, 429, "too_many_uploads")
        assert await begin(stand, other_id, files)
        assert (await stand.admin.delete(second)).status_code == 204
        third = await begin(stand, tenant_id, files)

        first_id = parse_id("adapter_upload", first.rsplit("/", 1)[1])
        await age(stand, first_id)
        error_of(await send(stand, first, CONFIG, 0, files.config), 410, "upload_expired")
        context = stand.app.state.context
        assert await upload_sessions.sweep(context.sessions, context.uploads) == 1

        error_of(await stand.admin.get(first), 404, "not_found")
        folder = stand.folder / "store" / "quarantine" / "uploads"
        third_id = parse_id("adapter_upload", third.rsplit("/", 1)[1])
        names = {path.name for path in folder.iterdir()}
        assert third_id.hex in names
        assert first_id.hex not in names
        assert len(names) == 2


async def age(stand: Stand, upload_id: UUID) -> None:
    async with stand.db.transaction() as session:
        await session.execute(
            text("update adapter_uploads set expires_at = :at where id = :id"),
            {"at": datetime.now(UTC) - timedelta(seconds=1), "id": upload_id},
        )


async def test_bytes_without_a_row_are_swept_once_they_are_old(stand: Stand) -> None:
    folders: UploadFolders = stand.app.state.context.uploads
    young, old = UUID(int=1), UUID(int=2)
    for upload_id in (young, old):
        folders.make(upload_id, 10)
    root = stand.folder / "store" / "quarantine" / "uploads"
    os.utime(root / old.hex, (1, 1))

    await upload_sessions.sweep(stand.db.sessions, folders)

    assert [path.name for path in root.iterdir()] == [young.hex]


async def test_a_full_disk_says_so_and_loses_nothing(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenant_id = (await stand.tenant("acme"))["id"]
    files = adapter()
    upload = await begin(stand, tenant_id, files)
    write = os.write

    def write_some(descriptor: int, data: bytes) -> int:
        if len(data) > 600:
            return write(descriptor, data[:600])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(upload_files.os, "write", write_some)
    full = await send(stand, upload, TENSORS, 0, files.model[:1000])
    monkeypatch.undo()

    error_of(full, 507, "storage_full")
    assert full.headers["retry-after"] == "60"
    at = await offset_of(stand, upload, TENSORS)
    assert at == 600
    assert (await send(stand, upload, TENSORS, at, files.model[at:])).status_code == 204
    assert (await send(stand, upload, CONFIG, 0, files.config)).status_code == 204
    assert (await stand.admin.post(f"{upload}/complete")).status_code == 201


async def test_no_room_for_all_of_it_is_said_before_a_byte_is_sent(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenant_id = (await stand.tenant("acme"))["id"]

    class Usage:
        free = 1000

    monkeypatch.setattr(upload_files.shutil, "disk_usage", lambda _: Usage)

    answer = await stand.admin.post(path_of(tenant_id), json=body_for(adapter()))

    error_of(answer, 507, "storage_full")


async def test_no_answer_tells_that_another_tenant_has_the_same_files(stand: Stand) -> None:
    """The whole conversation of the second tenant is the first one's, ids and times apart."""
    files = adapter()
    talks = []
    for slug in ("acme", "globex"):
        tenant_id = (await stand.tenant(slug))["id"]
        upload = await begin(stand, tenant_id, files)
        answers = [
            await send(stand, upload, CONFIG, 0, files.config),
            await send(stand, upload, TENSORS, 0, files.model),
            await stand.admin.post(f"{upload}/complete"),
            await stand.admin.get(upload),
        ]
        talks.append([(a.status_code, sorted(a.headers), _plain(a)) for a in answers])

    assert talks[0] == talks[1]
    stored = list((stand.folder / "store" / "adapters").glob("*/*"))
    assert len(stored) == 1, "stored once all the same"


def _plain(answer: httpx.Response) -> Any:
    """The body without what names things and times."""

    def strip(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                k: strip(v)
                for k, v in value.items()
                if not k.endswith("id") and not k.endswith("_at")
            }
        return [strip(item) for item in value] if isinstance(value, list) else value

    return strip(answer.json()) if answer.content else None


async def test_a_foreign_upload_is_unknown(stand: Stand) -> None:
    mine, theirs = [(await stand.tenant(slug))["id"] for slug in ("acme", "globex")]
    files = adapter()
    upload_id = (await begin(stand, theirs, files)).rsplit("/", 1)[1]
    upload = f"{path_of(mine)}/{upload_id}"

    answers = [
        await stand.admin.get(upload),
        await stand.admin.delete(upload),
        await send(stand, upload, CONFIG, 0, files.config),
        await stand.admin.get(f"{upload}/files/{CONFIG}"),
        await stand.admin.post(f"{upload}/complete"),
    ]

    for answer in answers:
        error_of(answer, 404, "not_found")
