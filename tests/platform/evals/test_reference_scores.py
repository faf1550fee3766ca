"""A reference's log-likelihood, from the suite to the verdict, is what transformers computes for it."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import torch
from loraplex_engine.client import EngineClient
from loraplex_platform.control.app import create_app
from loraplex_platform.db.session import open_database
from loraplex_platform.gateway.tokenization import BaseTokenizer, ModelTexts

from tests.platform.control.stand import Stand, cheap_passwords, settings_for
from tests.platform.evals.stand import case, ended, results_of, started, suite_of, working
from tests.platform.gateway.stand import eventually
from tests.support.engine_process import check_quiet, engine_process
from tests.support.fake_engine import FakeEngine
from tests.support.postgres import database_settings, serving_url
from tests.support.tiny_fleet import write_model
from tests.support.tiny_model import load_oracle

PROMPT, REFERENCE = "The capital of France is", " Paris, on the Seine."
# The engine may compute in bfloat16, the oracle in float32.
TOLERANCE = 0.05


async def test_a_reference_has_the_likelihood_that_transformers_gives_it(
    db_url: str, redis_url: str, short_tmp_path: Path
) -> None:
    folder = short_tmp_path
    model = write_model(folder / "models")
    tokenizer = BaseTokenizer(ModelTexts.read(model))
    prompt_ids = await tokenizer.encode_prompt(PROMPT, 512)
    [reference_ids] = await tokenizer.encode_plain([REFERENCE])
    tokenizer.close()
    oracle = load_oracle(model, torch.float32)
    with torch.inference_mode():
        logits = oracle(input_ids=torch.tensor([[*prompt_ids, *reference_ids]])).logits[0]
    told = logits[len(prompt_ids) - 1 : -1].float().log_softmax(-1)
    mean = float(told.gather(1, torch.tensor(reference_ids)[:, None]).mean())

    def check(least: float) -> dict[str, object]:
        return {
            "type": "reference_log_likelihood",
            "reference": REFERENCE,
            "min_mean_logprob": least,
        }

    settings = settings_for(db_url, redis_url, folder, model_dir=model)
    flags = ("--max-model-len", "512", "--num-blocks", "200", "--max-num-seqs", "8")
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        address = await enter(engine_process(folder, model, redis_url, *flags))
        db = await enter(open_database(database_settings(serving_url(db_url))))
        app = create_app(settings, passwords=cheap_passwords())
        await enter(app.router.lifespan_context(app))
        stand = Stand(app, FakeEngine(folder), db, redis_url, folder, settings)
        tenant = (await stand.tenant("acme"))["id"]
        suite = await suite_of(
            stand,
            tenant,
            case("below", check(mean - TOLERANCE), prompt=PROMPT),
            case("above", check(min(0.0, mean + TOLERANCE)), prompt=PROMPT),
            case(
                "same-as-itself",
                {
                    "type": "reference_log_likelihood",
                    "reference": REFERENCE,
                    "max_drop": 0.0,
                },
                prompt=PROMPT,
            ),
        )
        async with (
            EngineClient(address, gateway_id="looking") as engine,
            working(db, redis_url, model),
        ):
            await engine.connect(timeout_s=120)
            await eventually(lambda: engine.is_ready, "the engine is ready", deadline_s=120)
            deployments = await stand.admin.get("/admin/v1/deployments")
            baseline = deployments.json()["data"][0]["revision"]["id"]
            run = await ended(
                stand,
                tenant,
                await started(stand, tenant, suite, baseline_revision_id=baseline),
                deadline_s=200,
            )
            found = {
                name: row["status"]
                for name, row in (await results_of(stand, tenant, run["id"])).items()
            }
            await check_quiet(db, [], engine)
        for client in stand.clients:
            await client.aclose()

    assert found == {"below": "pass", "above": "fail", "same-as-itself": "pass"}
