"""A worker's eval part in this process, beside the control API of `tests.platform.control.stand`.

async with working(stand.db, stand.redis_url, stand.folder / "model"):
    run = await ended(stand, tenant_id, await started(stand, tenant_id, suite, deployment=BASE))
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from loraplex_engine.artifact import ModelShape
from loraplex_platform.db.session import Database
from loraplex_platform.evals.runner import EvalWorker
from loraplex_platform.gateway.routing import Router
from loraplex_platform.gateway.tokenization import BaseTokenizer, ModelTexts

from tests.platform.control.stand import BASE, AdapterFiles, Stand
from tests.platform.gateway.stand import eventually
from tests.support.adapter_files import make_adapter


@asynccontextmanager
async def working(
    db: Database,
    redis_url: str,
    model: Path,
    *,
    name: str = "worker-1",
    base_model: str = BASE,
    lease_s: float = 30.0,
) -> AsyncIterator[EvalWorker]:
    """Rounds every few milliseconds for as long as the block lasts; then it lets its runs go."""
    async with AsyncExitStack() as stack:
        tokenizer = BaseTokenizer(ModelTexts.read(model))
        stack.callback(tokenizer.close)
        router = await stack.enter_async_context(
            Router(db.sessions, gateway_id=name, redis_url=redis_url, poll_interval_s=0.1)
        )
        worker = EvalWorker(db.sessions, router, tokenizer, base_model, owner=name, lease_s=lease_s)
        rounds = asyncio.create_task(_rounds(worker))
        try:
            yield worker
            if rounds.done():
                rounds.result()
        finally:
            rounds.cancel()
            await asyncio.wait([rounds])
            await worker.close()


async def _rounds(worker: EvalWorker) -> None:
    while True:
        await worker.run_once()
        await asyncio.sleep(0.05)


def case(name: str, *checks: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A golden prompt of that id."""
    return {"id": name, "prompt": f"Prompt {name}", "checks": list(checks) or [ANY], **fields}


ANY: dict[str, Any] = {"type": "regex", "pattern": "(?s).*", "full": True}
NEVER: dict[str, Any] = {"type": "exact", "value": "this is never said"}


async def made(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], status: int = 201
) -> dict[str, Any]:
    """POST; the answer, whose status is checked."""
    answer = await client.post(f"/admin/v1{path}", json=body)
    assert answer.status_code == status, (answer.status_code, answer.text)
    return dict(answer.json())


async def suite_of(
    stand: Stand, tenant_id: str, *cases: dict[str, Any], name: str = "golden", **fields: Any
) -> str:
    """Import a suite; its id."""
    body = {"name": name, "lines": list(cases), **fields}
    found = await made(stand.admin, f"/tenants/{tenant_id}/eval-suites", body)
    return str(found["id"])


async def started(stand: Stand, tenant_id: str, suite_id: str, **fields: Any) -> str:
    """Queue a run; its id."""
    if "revision_id" not in fields:
        fields.setdefault("deployment", BASE)
    body = {"suite_id": suite_id, **fields}
    return str((await made(stand.admin, f"/tenants/{tenant_id}/eval-runs", body))["id"])


async def read(stand: Stand, tenant_id: str, run_id: str) -> dict[str, Any]:
    answer = await stand.admin.get(f"/admin/v1/tenants/{tenant_id}/eval-runs/{run_id}")
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def ended(
    stand: Stand, tenant_id: str, run_id: str, *, deadline_s: float = 90.0
) -> dict[str, Any]:
    """The run, once it has ended."""
    until_s = time.monotonic() + deadline_s
    while (run := await read(stand, tenant_id, run_id))["state"] in ("queued", "running"):
        assert time.monotonic() < until_s, run
        await asyncio.sleep(0.05)
    return run


async def results_of(stand: Stand, tenant_id: str, run_id: str) -> dict[str, dict[str, Any]]:
    """By case id."""
    answer = await stand.admin.get(
        f"/admin/v1/tenants/{tenant_id}/eval-runs/{run_id}/results", params={"limit": 100}
    )
    assert answer.status_code == 200, answer.text
    rows = answer.json()["data"]
    assert len({row["case_id"] for row in rows}) == len(rows)
    return {row["case_id"]: row for row in rows}


async def deploy_adapter(
    stand: Stand, tenant_id: str, folder: Path, model: Path, name: str = "one"
) -> dict[str, Any]:
    """An adapter of real engines' model under its name, once an engine is ready to probe it."""
    made = folder / "adapter"
    make_adapter(made, ModelShape.from_config_json(model / "config.json"), rank=4, size=0.3)
    files = AdapterFiles(
        (made / "adapter_config.json").read_bytes(),
        (made / "adapter_model.safetensors").read_bytes(),
    )
    answers = []

    async def is_uploaded() -> bool:
        answers.append(await stand.upload(tenant_id, name, files))
        assert answers[-1].status_code in (201, 503), answers[-1].text
        return answers[-1].status_code == 201

    await eventually(is_uploaded, "the engine is ready and the adapter probed", deadline_s=120)
    answer = await stand.admin.put(
        f"/admin/v1/tenants/{tenant_id}/deployments/{name}",
        json={"version_id": answers[-1].json()["version"]["id"]},
    )
    assert answer.status_code == 200, answer.text
    return dict(answer.json())
