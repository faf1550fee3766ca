"""A suite on the real engine, from the import to the comparison: bits, verdicts, figures and books."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

from loraplex_engine.client import EngineClient
from loraplex_platform.control.app import create_app
from loraplex_platform.db.session import open_database

from tests.platform.control.stand import Stand, cheap_passwords, settings_for
from tests.platform.evals.stand import (
    case,
    deploy_adapter,
    ended,
    results_of,
    started,
    suite_of,
    working,
)
from tests.support.engine_process import check_quiet, engine_process
from tests.support.fake_engine import FakeEngine
from tests.support.postgres import database_settings, serving_url
from tests.support.tiny_fleet import write_model

CASES = [
    case("greedy", params={"max_tokens": 12}),
    case("sampled", params={"max_tokens": 12, "temperature": 1.0, "seed": 7}),
    case(
        "chat",
        prompt=None,
        messages=[{"role": "user", "content": "The capital of France?"}],
        params={"max_tokens": 12},
    ),
]


async def test_the_same_revision_gives_the_same_bits_and_an_adapter_other_answers(
    db_url: str, redis_url: str, short_tmp_path: Path
) -> None:
    folder = short_tmp_path
    model = write_model(folder / "models")
    store = f"file://{folder / 'store'}"
    flags = ("--max-model-len", "512", "--num-blocks", "200", "--max-num-seqs", "8")
    settings = settings_for(db_url, redis_url, folder, model_dir=model, store_url=store)
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        address = await enter(
            engine_process(folder, model, redis_url, "--store-url", store, *flags)
        )
        db = await enter(open_database(database_settings(serving_url(db_url))))
        app = create_app(settings, passwords=cheap_passwords())
        await enter(app.router.lifespan_context(app))
        # Scripted engines have no part in this: the one that a stand has is never started.
        stand = Stand(app, FakeEngine(folder), db, redis_url, folder, settings)
        stack.push_async_callback(_close, stand)
        tenant = (await stand.tenant("acme"))["id"]
        deployed = await deploy_adapter(stand, tenant, folder, model)
        suite = await suite_of(stand, tenant, *CASES)
        async with working(db, redis_url, model):
            first = await ended(stand, tenant, await started(stand, tenant, suite))
            # Other company and another order: the row rule says that it does not matter.
            again = await ended(stand, tenant, await started(stand, tenant, suite, concurrency=1))
            pairs = await suite_of(
                stand,
                tenant,
                *(one | {"checks": [{"type": "pairwise"}]} for one in CASES),
                name="p",
            )
            adapted = await ended(
                stand,
                tenant,
                await started(
                    stand,
                    tenant,
                    pairs,
                    revision_id=deployed["revision"]["id"],
                    baseline_revision_id=first["revision_id"],
                ),
            )
            lines = [{"at_s": 0.0, "prompt_tokens": 40, "completion_tokens": 8}] * 4
            replay = await suite_of(stand, tenant, *lines, name="r", kind="performance")
            figures = await ended(
                stand, tenant, await started(stand, tenant, replay, concurrency=2)
            )

        assert first["state"] == again["state"] == figures["state"] == "passed", figures
        assert again["summary"].get("changed") is None
        one, two = [await results_of(stand, tenant, run["id"]) for run in (first, again)]
        assert {name: row["bits_sha256"] for name, row in one.items()} == {
            name: row["bits_sha256"] for name, row in two.items()
        }
        assert len(set(first["fingerprints"] + again["fingerprints"])) == 1
        assert all(row["mean_logprob"] < 0 for row in one.values())
        other = await results_of(stand, tenant, adapted["id"])
        assert adapted["state"] == "failed"
        assert {name: row["baseline_output"] for name, row in other.items()} == {
            name: row["output"] for name, row in one.items()
        }
        assert any(row["output"] != one[name]["output"] for name, row in other.items())
        assert figures["summary"]["figures"]["output_tokens"] == 32
        async with EngineClient(address, gateway_id="looking") as engine:
            await engine.connect()
            await check_quiet(db, [], engine)


async def _close(stand: Stand) -> None:
    for client in stand.clients:
        await client.aclose()
