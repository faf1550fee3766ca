"""Uploading adapters: what becomes a version, and what is refused with which words."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from loraplex_engine.artifact import ModelShape
from loraplex_engine.protocol import Abort, Generate
from loraplex_platform.db import AdapterVersion, AuditLog, Request
from loraplex_platform.metering.invariants import check_invariants
from loraplex_platform.registry import probe
from sqlalchemy import select

from tests.platform.control.stand import ADMIN_KEY, AdapterFiles, Stand, adapter, error_of
from tests.platform.control.test_playground import serving
from tests.support.adapter_files import (
    TINY_SHAPE,
    Array,
    encode_safetensors,
    encode_tensors,
    lora_config,
    lora_tensors,
)
from tests.support.fake_engine import Script

A0 = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def files_stored(stand: Stand) -> list[Path]:
    return list((stand.folder / "store" / "adapters").glob("*"))


async def num_stored(stand: Stand) -> int:
    async with stand.db.sessions() as session:
        return len((await session.scalars(select(AdapterVersion))).all())


async def test_an_upload_becomes_an_immutable_version_with_a_report(stand: Stand) -> None:
    tenant = await stand.tenant("acme")

    answer = await stand.upload(tenant["id"], "capitals", adapter())

    assert answer.status_code == 201, answer.text
    made = answer.json()
    assert set(made) == {"object", "id", "tenant_id", "name", "created_at", "version"}
    version = made["version"]
    assert (version["version"], version["status"], version["rank"]) == (1, "ready", 8)
    assert version["target_modules"] == ["q_proj", "v_proj"]
    assert version["size_bytes"] == len(adapter().config) + len(adapter().model)
    report = version["report"]
    assert all(check["ok"] for check in report["checks"])
    assert {"header", "pairs", "finite", "base", "probe"} <= {c["name"] for c in report["checks"]}
    assert (report["matched_modules"], report["total_modules"]) == (4, 14)
    assert report["norms"]["max"] > 0
    probe = report["probe"]
    assert probe["changed"] == len(probe["samples"]) == 4
    assert all(sample["base"] != sample["adapter"] for sample in probe["samples"])
    digest = version["digest"]
    folder = stand.folder / "store" / "adapters" / digest[7:9] / digest[7:]
    assert (folder / "adapter_model.safetensors").read_bytes() == adapter().model
    path = f"/admin/v1/tenants/{tenant['id']}/adapters"
    [listed] = (await stand.admin.get(path)).json()["data"]
    assert listed["versions"] == [version]
    assert (await stand.admin.get(f"{path}/{made['id']}")).json() == listed


async def test_the_same_content_is_the_same_version_and_other_content_another(
    stand: Stand,
) -> None:
    tenant, other = await stand.tenant("acme"), await stand.tenant("globex")
    first = await stand.upload(tenant["id"], "capitals", adapter(lora_alpha=16))

    again = await stand.upload(tenant["id"], "capitals", adapter(lora_alpha=16))
    alpha = await stand.upload(tenant["id"], "capitals", adapter(lora_alpha=32))  # tensors equal
    elsewhere = await stand.upload(other["id"], "capitals", adapter(lora_alpha=16))

    assert (first.status_code, again.status_code) == (201, 200)
    assert again.json() == first.json()
    assert alpha.status_code == 201
    assert alpha.json()["id"] == first.json()["id"]
    assert alpha.json()["version"]["version"] == 2
    assert alpha.json()["version"]["digest"] != first.json()["version"]["digest"]
    assert elsewhere.json()["version"]["digest"] == first.json()["version"]["digest"]
    assert elsewhere.json()["id"] != first.json()["id"]


async def test_the_probe_is_metered_and_absorbed(stand: Stand) -> None:
    tenant = await stand.tenant("acme")
    await stand.upload(tenant["id"], "capitals", adapter())

    asked = stand.engine.received_of(Generate)
    async with stand.db.sessions() as session:
        requests = (await session.scalars(select(Request))).all()
    books = await check_invariants(stand.db.sessions)

    assert len(asked) == 8
    assert {m.adapter_digest for m in asked if isinstance(m, Generate)} >= {None}
    assert {m.sampling.temperature for m in asked if isinstance(m, Generate)} == {0.0}
    assert {(r.kind, r.state, r.key_id) for r in requests} == {("probe", "settled", None)}
    assert books.ok, [check for check in books.checks if not check.ok]
    generated = sum(entry.usage.completion_tokens for entry in stand.engine.journal)
    assert books.identity.absorbed == generated > 0
    assert books.identity.billed == books.identity.pending_requests == 0
    log = (await stand.admin.get("/admin/v1/requests", params={"tenant_id": tenant["id"]})).json()
    assert len(log["data"]) == 8
    usage = (await stand.admin.get("/admin/v1/usage", params={"start_time": 0})).json()
    assert usage["data"] == []  # the platform pays


def raw(config: Any = None, model: bytes | None = None) -> AdapterFiles:
    text = lora_config() if config is None else config
    return AdapterFiles(
        text if isinstance(text, bytes) else json.dumps(text).encode(),
        encode_tensors(lora_tensors()) if model is None else model,
    )


def changed(**tensors: Array) -> bytes:
    values = lora_tensors()
    for name, value in tensors.items():
        values[{"a0": A0}[name]] = value
    return encode_tensors(values)


def zipped() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", b"x")
    return buffer.getvalue()


def header_of(model: bytes) -> tuple[dict[str, Any], bytes]:
    length = int.from_bytes(model[:8], "little")
    return json.loads(model[8 : 8 + length]), model[8 + length :]


def overlapping() -> bytes:
    header, data = header_of(encode_tensors(lora_tensors()))
    names = list(header)
    header[names[2]]["data_offsets"] = header[names[0]]["data_offsets"]
    return encode_safetensors(json.dumps(header), data)


def duplicate_key() -> bytes:
    header, data = header_of(encode_tensors(lora_tensors()))
    entry = json.dumps(header[A0])
    text = json.dumps(header)[:-1] + f', "{A0}": {entry}}}'
    return encode_safetensors(text, data)


def other_base() -> bytes:
    shape = ModelShape(
        num_layers=2,
        hidden_size=32,
        intermediate_size=48,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        vocab_size=128,
    )
    return encode_tensors(lora_tensors(shape))


def zeros() -> bytes:
    return encode_tensors({n: v * 0 if "lora_B" in n else v for n, v in lora_tensors().items()})


NAN = np.full((8, TINY_SHAPE.hidden_size), np.nan, np.float32)

# name -> (what is uploaded, the param it is refused with, words of the message)
BAD: Mapping[str, tuple[AdapterFiles, str, str]] = {
    "pickle": (
        raw(model=pickle.dumps({"a": 1}, protocol=4) + b"x" * 64),
        "adapter_model",
        "pickle",
    ),
    "zip": (raw(model=zipped()), "adapter_model", "zip archive"),
    "not json": (raw(config=b"{nope"), "adapter_config", "JSON"),
    "config key twice": (raw(config=b'{"r": 8, "r": 8}'), "adapter_config", "twice"),
    "wrong shape": (
        raw(model=changed(a0=np.ones((8, 63), np.float32))),
        f"adapter_model.{A0}",
        "shape",
    ),
    "wrong base": (raw(model=other_base()), f"adapter_model.{A0}", "another base model"),
    "nan": (raw(model=changed(a0=NAN)), f"adapter_model.{A0}", "NaN"),
    "zero effect": (raw(model=zeros()), "adapter_model", "no effect"),
    "rank beyond the cap": (adapter(rank=65), "adapter_config.r", "cap of 64"),
    "truncated": (raw(model=encode_tensors(lora_tensors())[:-100]), "adapter_model", "truncated"),
    "tensor twice": (raw(model=duplicate_key()), "adapter_model", "twice"),
    "overlap": (raw(model=overlapping()), "adapter_model", "overlap"),
    "empty": (raw(model=b""), "adapter_model", "bytes"),
    "dora": (raw(config=lora_config(use_dora=True)), "adapter_config.use_dora", "DoRA"),
    "remote code": (
        raw(config=lora_config(auto_mapping={"base_model_class": "os.system"})),
        "adapter_config.auto_mapping",
        "code",
    ),
    "unused tensor": (
        raw(config=lora_config(target_modules=["q_proj"])),
        "adapter_model",
        "does not target",
    ),
}


async def test_what_cannot_be_served_is_refused_by_field_and_remedy(stand: Stand) -> None:
    tenant = await stand.tenant("acme")

    for name, (files, param, words) in BAD.items():
        error = error_of(
            await stand.upload(tenant["id"], "capitals", files), 400, "adapter_rejected"
        )
        assert error["param"].startswith(param), (name, error)
        assert words.lower() in error["message"].lower(), (name, error)

    assert await num_stored(stand) == 0
    assert stand.engine.received_of(Generate) == []
    assert files_stored(stand) == []
    assert (await stand.upload(tenant["id"], "capitals", adapter())).status_code == 201


async def test_file_names_and_parts_are_checked(stand: Stand) -> None:
    tenant_id = (await stand.tenant("acme"))["id"]
    for name in ("../adapter_model.safetensors", "/etc/passwd", "a\\b", "pytorch_model.bin", ".."):
        refused = await stand.upload(tenant_id, "capitals", adapter(), model_name=name)
        assert error_of(refused, 400, "adapter_rejected")["param"] == "filename", name
    swapped = await stand.upload(
        tenant_id, "capitals", adapter(), config_name="adapter_model.safetensors"
    )
    assert error_of(swapped, 400, "adapter_rejected")["param"] == "adapter_config"

    for name in ("", "-x", "a/b", "../x", "a b", "x" * 81, "é"):
        refused = await stand.upload(tenant_id, name, adapter())
        assert error_of(refused, 400, "invalid_request")["param"] == "name"
    extra = await stand.upload(tenant_id, "capitals", adapter(), data={"tenant_id": "ten_x"})
    assert error_of(extra, 400, "invalid_request")["param"] == "tenant_id"
    path = f"/admin/v1/tenants/{tenant_id}/adapters"
    for missing in ("name", "adapter_config", "adapter_model"):
        parts = {"name": b"capitals", "adapter_config": b"{}", "adapter_model": b"x"}
        del parts[missing]
        files = {part: (None, value) for part, value in parts.items()}
        refused = await stand.admin.post(path, files=files)
        assert error_of(refused, 400, "invalid_request")["param"] == missing
    twice = [("name", (None, b"a")), ("name", (None, b"b"))]
    assert error_of(await stand.admin.post(path, files=twice), 400, "invalid_request")
    for content_type, body in (
        ("application/json", b"{}"),
        ("multipart/form-data", b""),
        ("multipart/form-data; boundary=x", b"garbage"),
        ("multipart/form-data; boundary=x", b'--x\r\nContent-Disposition: form-data; name="na'),
    ):
        refused = await stand.admin.post(path, content=body, headers={"content-type": content_type})
        error_of(refused, 400, "invalid_request")
    assert await num_stored(stand) == 0


async def test_a_tokenizer_that_is_named_must_be_the_bases(stand: Stand) -> None:
    tenant_id = (await stand.tenant("acme"))["id"]
    [base] = (await stand.admin.get("/admin/v1/base-models")).json()["data"]

    for field in ("tokenizer_sha256", "chat_template_sha256"):
        other = await stand.upload(tenant_id, "a", adapter(), data={field: "0" * 64})
        assert error_of(other, 400, "adapter_rejected")["param"] == field
        malformed = await stand.upload(tenant_id, "a", adapter(), data={field: "x"})
        assert error_of(malformed, 400, "invalid_request")["param"] == field
    hashes = {name: base[name] for name in ("tokenizer_sha256", "chat_template_sha256")}
    answer = await stand.upload(tenant_id, "a", adapter(), data=hashes)

    assert answer.status_code == 201
    assert "tokenizer" in {c["name"] for c in answer.json()["version"]["report"]["checks"]}


async def test_without_effect_in_the_engine_it_is_refused_with_advice(stand: Stand) -> None:
    tenant_id = (await stand.tenant("acme"))["id"]
    stand.engine.script = Script(token_ids=[40, 41, 42])

    error = error_of(await stand.upload(tenant_id, "a", adapter()), 400, "adapter_rejected")

    assert error["param"] == "adapter_model"
    assert "changes nothing" in error["message"]
    assert "training ran" in error["message"]
    assert await num_stored(stand) == 0
    assert (await check_invariants(stand.db.sessions)).ok


async def test_output_that_is_not_finite_is_refused(stand: Stand) -> None:
    tenant_id = (await stand.tenant("acme"))["id"]
    failing = Script(error_after=2, error_code="non_finite_logits")
    stand.engine.script_for = lambda g: failing if g.adapter_digest else Script()

    error = error_of(await stand.upload(tenant_id, "a", adapter()), 400, "adapter_rejected")

    assert "not finite" in error["message"]
    assert await num_stored(stand) == 0
    assert (await check_invariants(stand.db.sessions)).ok


async def test_without_a_ready_engine_nothing_is_stored(stand: Stand) -> None:
    tenant_id = (await stand.tenant("acme"))["id"]
    await stand.engine.crash()

    answer = await stand.upload(tenant_id, "a", adapter())

    error_of(answer, 503, "engine_unavailable")
    assert int(answer.headers["retry-after"]) >= 1
    assert await num_stored(stand) == 0
    assert files_stored(stand) == []
    assert (await stand.admin.get(f"/admin/v1/tenants/{tenant_id}/adapters")).json()["data"] == []
    await stand.engine.start()
    assert (await stand.upload(tenant_id, "a", adapter())).status_code == 201


async def test_an_upload_without_a_probe_is_checked_and_asks_no_engine(stand: Stand) -> None:
    tenant_id = (await stand.tenant("acme"))["id"]
    await stand.engine.crash()

    answer = await stand.upload(tenant_id, "a", adapter(), data={"probe": "false"})

    assert answer.status_code == 201, answer.text
    report = answer.json()["version"]["report"]
    assert report["probe"] is None
    names = {check["name"] for check in report["checks"]}
    assert {"header", "pairs", "finite", "base"} <= names
    assert "probe" not in names
    assert stand.engine.received_of(Generate) == []


async def test_a_probe_is_not_made_up_for_and_whoever_asks_is_told(stand: Stand) -> None:
    tenant_id = (await stand.tenant("acme"))["id"]
    first = await stand.upload(tenant_id, "a", adapter(), data={"probe": "false"})

    asking = await stand.upload(tenant_id, "a", adapter())
    again = await stand.upload(tenant_id, "a", adapter(), data={"probe": "false"})
    other = await stand.upload(tenant_id, "b", adapter())
    known = await stand.upload(tenant_id, "b", adapter(), data={"probe": "false"})

    error = error_of(asking, 409, "conflict")
    assert error["param"] == "probe"
    assert "'probe' false" in error["message"]
    assert (again.status_code, again.json()) == (200, first.json())
    assert other.status_code == 201
    assert other.json()["version"]["report"]["probe"]["changed"] == len(probe.PROMPTS)
    assert (known.status_code, known.json()) == (200, other.json())


async def test_a_copy_that_was_not_probed_and_came_first_is_told_too(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenant_id = (await stand.tenant("acme"))["id"]
    run = probe.Prober.run

    async def run_slowly(self: probe.Prober, target: probe.ProbeTarget) -> Any:
        first = await stand.upload(tenant_id, "a", adapter(), data={"probe": "false"})
        assert first.status_code == 201, first.text
        return await run(self, target)

    monkeypatch.setattr(probe.Prober, "run", run_slowly)

    late = await stand.upload(tenant_id, "a", adapter())

    assert error_of(late, 409, "conflict")["param"] == "probe"


async def test_whether_to_probe_is_yes_or_no(stand: Stand) -> None:
    tenant_id = (await stand.tenant("acme"))["id"]

    answer = await stand.upload(tenant_id, "a", adapter(), data={"probe": "maybe"})

    assert error_of(answer, 400, "invalid_request")["param"] == "probe"
    assert await num_stored(stand) == 0


@pytest.mark.parametrize(
    "script",
    [
        Script(crash_after=3),
        Script(reject="queue_full"),
        Script(reject="adapter_unavailable"),
        Script(error_after=1, error_code="draining"),  # says nothing about the adapter
    ],
)
async def test_an_engine_that_fails_during_the_probe_is_a_503_and_the_books_hold(
    stand: Stand, script: Script
) -> None:
    tenant_id = (await stand.tenant("acme"))["id"]
    failing = iter([script])  # once: the scripted engine can die only once
    stand.engine.script_for = lambda g: next(failing, Script()) if g.adapter_digest else Script()

    answer = await stand.upload(tenant_id, "a", adapter())

    error_of(answer, 503, "engine_unavailable")
    assert await num_stored(stand) == 0
    books = await check_invariants(stand.db.sessions)
    assert books.identity.difference == books.identity.pending_requests == 0


@pytest.mark.parametrize("script", [Script(never_accepts=True), Script(never_answers=True)])
async def test_an_engine_that_never_gets_to_the_probe_is_given_up_and_absorbed(
    stand: Stand, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "TIMEOUT_S", 0.5)
    tenant_id = (await stand.tenant("acme"))["id"]
    stand.engine.script_for = lambda g: script if g.adapter_digest else Script()

    answer = await stand.upload(tenant_id, "a", adapter())

    error_of(answer, 503, "engine_unavailable")
    for message in stand.engine.received_of(Generate):
        assert isinstance(message, Generate)
        assert message.deadline_unix_s is not None
        assert message.deadline_unix_s < time.time() + 5
    aborts = stand.engine.received_of(Abort)
    assert len(aborts) >= len(probe.PROMPTS)
    assert all(isinstance(abort, Abort) and abort.is_platform_fault for abort in aborts)
    books = await check_invariants(stand.db.sessions)
    assert books.identity.difference == books.identity.pending_requests == 0
    assert books.identity.billed == 0


async def test_the_engines_own_refusal_is_the_adapters_fault(stand: Stand) -> None:
    tenant_id = (await stand.tenant("acme"))["id"]
    refusing = Script(reject="adapter_invalid", reject_message="rank 8 is beyond this replica")
    stand.engine.script_for = lambda g: refusing if g.adapter_digest else Script()

    error = error_of(await stand.upload(tenant_id, "a", adapter()), 400, "adapter_rejected")

    assert "rank 8 is beyond" in error["message"]


async def test_uploads_over_the_cap_end_early(
    db_url: str, redis_url: str, short_tmp_path: Path
) -> None:
    async with Stand.open(db_url, redis_url, short_tmp_path, max_adapter_bytes=10_000) as stand:
        tenant_id = (await stand.tenant("acme"))["id"]

        declared = await stand.upload(tenant_id, "a", raw(model=b"x" * (4 << 20)))
        error_of(declared, 413, "request_too_large")
        capped = await stand.upload(tenant_id, "a", adapter())  # 14 kB
        assert error_of(capped, 413, "request_too_large")["param"] == "adapter_model"

        async def endless() -> Any:
            yield b'--x\r\nContent-Disposition: form-data; name="adapter_model"\r\n\r\n'
            while True:
                yield b"x" * 65536

        chunked = await stand.admin.post(
            f"/admin/v1/tenants/{tenant_id}/adapters",
            content=endless(),
            headers={"content-type": "multipart/form-data; boundary=x"},
        )
        error_of(chunked, 413, "request_too_large")

        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        async with serving(stand.app) as url, httpx.AsyncClient(headers=headers) as client:
            # On a socket too, and the connection stays usable: the rest is read and dropped.
            for size in (4 << 20, 20_000):
                answer = await client.post(
                    f"{url}/admin/v1/tenants/{tenant_id}/adapters",
                    data={"name": "a"},
                    files={"adapter_model": ("adapter_model.safetensors", b"x" * size)},
                )
                error_of(answer, 413, "request_too_large")
            assert (await client.get(f"{url}/live")).status_code == 200


async def test_a_check_beyond_its_memory_is_refused_and_the_service_lives(
    db_url: str, redis_url: str, short_tmp_path: Path
) -> None:
    # Less than the interpreter with numpy has mapped already: the file cannot be read.
    limits = {"validation_memory_bytes": 64 << 20}
    async with Stand.open(db_url, redis_url, short_tmp_path, **limits) as stand:
        tenant_id = (await stand.tenant("acme"))["id"]

        answer = await stand.upload(tenant_id, "a", adapter())

        error = error_of(answer, 400, "adapter_rejected")
        assert "more memory" in error["message"]
        assert (await stand.admin.get("/ready")).status_code == 200


async def test_a_check_beyond_its_time_is_killed(
    db_url: str, redis_url: str, short_tmp_path: Path
) -> None:
    async with Stand.open(db_url, redis_url, short_tmp_path, validation_timeout_s=0.01) as stand:
        tenant_id = (await stand.tenant("acme"))["id"]

        error = error_of(await stand.upload(tenant_id, "a", adapter()), 400, "adapter_rejected")

        assert "more than the 0.01 s" in error["message"]
        assert (await stand.admin.get("/ready")).status_code == 200


async def test_uploads_of_one_adapter_at_once_make_one_version(stand: Stand) -> None:
    import asyncio

    tenant_id = (await stand.tenant("acme"))["id"]
    answers: list[httpx.Response] = await asyncio.gather(
        *(stand.upload(tenant_id, "a", adapter()) for _ in range(3))
    )

    assert sorted(answer.status_code for answer in answers) == [200, 200, 201]
    assert len({answer.json()["version"]["id"] for answer in answers}) == 1
    async with stand.db.sessions() as session:
        actions = (await session.scalars(select(AuditLog.action))).all()
    assert actions.count("adapter_version.create") == 1


async def test_what_became_no_version_leaves_the_store_and_nothing_else_does(stand: Stand) -> None:
    intake = stand.app.state.context.intake
    adapters = stand.folder / "store" / "adapters"

    def put(name: str, digest: str) -> Path:
        source = stand.folder / name
        source.mkdir()
        (source / "adapter_config.json").write_bytes(adapter().config)
        (source / "adapter_model.safetensors").write_bytes(adapter().model)
        intake._store.put(source, digest)
        return adapters / digest[7:9] / digest[7:]

    tenant_id = (await stand.tenant("acme"))["id"]
    stored = (await stand.upload(tenant_id, "a", adapter())).json()["version"]["digest"]
    in_use = adapters / stored[7:9] / stored[7:]
    orphan, young, again = (put(c, f"sha256:{c * 64}") for c in "abc")
    for folder in (in_use, orphan, again):
        os.utime(folder, (0, 0))
    shutil.rmtree(stand.folder / "c")
    put("c", f"sha256:{'c' * 64}")  # uploaded once more: it may be on its way

    assert await intake.sweep() == 1

    assert not orphan.exists()
    assert [folder.exists() for folder in (in_use, young, again)] == [True] * 3
    assert await intake.sweep() == 0


async def test_the_quarantine_is_left_empty(
    stand: Stand, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import tempfile

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    tenant_id = (await stand.tenant("acme"))["id"]

    await stand.upload(tenant_id, "a", adapter())
    await stand.upload(tenant_id, "a", raw(model=b"junk"))
    await stand.upload(tenant_id, "a", adapter(), model_name="../x")

    assert os.listdir(tmp_path) == []
    [ours] = (stand.folder / "store" / "quarantine").glob("process-*")
    assert os.listdir(ours) == ["lock"]
    assert ADMIN_KEY not in str(stand.app.state.context)
