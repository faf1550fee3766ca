"""A score on a real engine is, to the last bit, what the answer itself said of its tokens."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from uuid import UUID

import openai
import pytest
from loraplex_engine.client import EngineClient
from loraplex_platform.db import Request
from loraplex_platform.db.session import open_database
from loraplex_platform.fleet.absorbed import Answer
from loraplex_platform.gateway import scoring
from loraplex_platform.gateway.app import open_gateway
from loraplex_platform.ids import parse_id
from sqlalchemy import select

from tests.platform.gateway.stand import BASE, add_base, deploy, eventually, serving, settings_for
from tests.support import rollouts
from tests.support.engine_process import check_quiet, engine_process
from tests.support.metering import add_customer
from tests.support.postgres import database_settings, serving_url
from tests.support.tiny_fleet import write_model


def _as_real(value: float) -> float:
    """As the books keep it: in 32 bits."""
    [rounded] = struct.unpack("f", struct.pack("f", value))
    return float(rounded)


async def test_scores_have_the_bits_that_the_answers_had(
    db_url: str, redis_url: str, short_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The canary has the stable revision's weights here, and by the row rule a row has its own bits however
    it came to be computed: decoded token by token, or told as a whole beside others.
    """
    model = write_model(short_tmp_path / "models")
    scored: list[list[float]] = []
    mean_logprob = scoring.mean_logprob

    def spy(answer: Answer, num_tokens: int) -> float:
        scored.append(answer.logprobs)
        return mean_logprob(answer, num_tokens)

    monkeypatch.setattr(scoring, "mean_logprob", spy)
    settings = settings_for(db_url, redis_url, short_tmp_path, model_dir=model)
    flags = ("--max-model-len", "1024", "--num-blocks", "200", "--max-num-seqs", "8")
    async with (
        engine_process(short_tmp_path, model, redis_url, *flags) as address,
        open_database(database_settings(serving_url(db_url))) as db,
        open_gateway(settings) as gateway,
        serving(gateway) as url,
        EngineClient(address, gateway_id="tests") as engine,
    ):
        customer = await add_customer(db)
        deployment_id = await deploy(db, await add_base(db), None, BASE)
        canary_id = await rollouts.add_revision(db, deployment_id)
        rollout_id = await rollouts.add_rollout(
            db, deployment_id, canary_id, weight_bp=10_000, score_bp=10_000
        )
        await eventually(lambda: gateway.router.num_ready == 1, "the engine", deadline_s=120)
        await engine.connect(timeout_s=60)
        async with openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key=customer.secret, max_retries=0, timeout=120
        ) as client:
            for temperature in (0.0, 0.9):
                answer = await client.chat.completions.with_raw_response.create(
                    model=BASE,
                    messages=[{"role": "user", "content": "Tell me of the sea. " * 12}],
                    max_tokens=40,
                    temperature=temperature,
                    seed=11,
                    logprobs=True,
                    extra_body={"ignore_eos": True},
                )
                choice = answer.parse().choices[0]
                assert choice.logprobs is not None
                assert choice.logprobs.content is not None
                told = [token.logprob for token in choice.logprobs.content]
                assert len(told) == 40
                await eventually(lambda: gateway.copying.num_pending == 0, "the score")

                assert scored.pop() == told
                async with db.sessions() as session:
                    id_ = parse_id("request", answer.headers["x-request-id"])
                    request = await session.get_one(Request, id_)
                assert request.stable_logprob is not None
                assert _as_real(request.stable_logprob) == _as_real(math.fsum(told) / 40)

            await rollouts.change_rollout(
                db, rollout_id, state="shadow", weight_bp=0, shadow_bp=10_000
            )
            await client.completions.create(model=BASE, prompt="The sea", max_tokens=24, seed=3)
            await eventually(lambda: gateway.copying.num_pending == 0, "shadow and scores")
            assert scored[0] == scored[1]  # the same draw of the same weights is the same answer
            async with db.sessions() as session:
                statement = select(Request).where(Request.endpoint == "completions")
                pair = list(await session.scalars(statement))
        assert {request.arm for request in pair} == {"stable", "shadow"}
        assert len({request.stable_logprob for request in pair}) == 1
        assert len({request.finish_reason for request in pair}) == 1
        await check_quiet(db, [gateway], engine)


def test_the_mean_is_of_all_tokens_or_of_none() -> None:
    def answer(reason: str, logprobs: list[float]) -> Answer:
        made = Answer(UUID(int=1), None, "")  # type: ignore[arg-type] # no replica is asked for it
        made.finish_reason, made.logprobs = reason, logprobs  # type: ignore[assignment]
        return made

    assert scoring.mean_logprob(answer("length", [-1.0, -2.0]), 2) == -1.5
    for broken in (
        answer("error", [-1.0]),
        answer("length", [-1.0]),
        answer("length", [-1.0, -math.inf]),
    ):
        with pytest.raises(scoring.UnscoredError):
            scoring.mean_logprob(broken, 2)
