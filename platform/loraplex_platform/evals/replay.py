"""Replay a trace: ask as it was asked once, in time and length, and measure."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final

from loraplex_engine.client import EngineLostError
from loraplex_engine.protocol import SamplingParams

from loraplex_platform.evals.asking import Asker, CaseError, CaseTimeoutError
from loraplex_platform.evals.cases import CaseResult, FindModel
from loraplex_platform.evals.performance import (
    Figures,
    Sample,
    figures,
    gaps_of,
    synthetic_prompt,
)
from loraplex_platform.evals.records import RunOptions, Target
from loraplex_platform.evals.suites import PerformanceContent, TraceLine
from loraplex_platform.gateway.tokenization import BaseTokenizer

KV_INTERVAL_S: Final = 1.0
STATS_TIMEOUT_S: Final = 1.0

Keep = Callable[[int, str, CaseResult], Awaitable[None]]


@dataclass(slots=True)
class Replay:
    """One replay, its samples as they come. At most `options.concurrency` requests are in flight."""

    asker: Asker
    target: Target
    options: RunOptions
    find_model: FindModel
    keep: Keep
    samples: list[Sample] = field(default_factory=list)
    num_shortened: int = 0
    _in_flight: int = 0
    _max_in_flight: int = 0
    _began_s: float = 0.0
    _kv_usage: list[float] = field(default_factory=list)
    _plain_ids: list[int] = field(default_factory=list)

    async def run(self, content: PerformanceContent) -> None:
        """To its end; `figures` may be asked for also when it was cancelled before."""
        places = asyncio.Semaphore(self.options.concurrency)
        self._plain_ids = _plain_ids_of(self.asker.tokenizer)
        self._began_s = time.monotonic()
        watching = asyncio.create_task(self._watch_kv(), name="eval kv occupancy")
        try:
            async with asyncio.TaskGroup() as group:
                for index, line in enumerate(content.trace):
                    if content.pace == "recorded":
                        await asyncio.sleep(self._began_s + line.at_s - time.monotonic())
                    # A request whose place is taken comes late: that is what the concurrency says.
                    await places.acquire()
                    group.create_task(self._one(index, line, places))
        finally:
            watching.cancel()
            await asyncio.wait([watching])

    def figures(self) -> Figures:
        """Of what has ended so far."""
        return figures(
            self.samples,
            elapsed_s=time.monotonic() - self._began_s,
            concurrency=self.options.concurrency,
            max_in_flight=self._max_in_flight,
            kv_usage=self._kv_usage,
        )

    async def _one(self, index: int, line: TraceLine, places: asyncio.Semaphore) -> None:
        self._in_flight += 1
        self._max_in_flight = max(self._max_in_flight, self._in_flight)
        try:
            result = await self._ask(index, line)
        finally:
            self._in_flight -= 1
            places.release()
        answer = result.answer
        self.samples.append(
            Sample(
                ttft_ms=None if answer is None else answer.ttft_ms,
                gaps_ms=[] if answer is None else gaps_of(answer.arrivals_ms),
                completion_tokens=0 if answer is None else len(answer.token_ids),
                is_aborted=result.status != "pass",
            )
        )
        await self.keep(index, f"line-{index + 1}", result)

    async def _ask(self, index: int, line: TraceLine) -> CaseResult:
        target: Target | None = self.target
        if line.model is not None:
            target = await self.find_model(line.model)
        if target is None:
            return CaseResult("error", f"there is no model {line.model}")
        context = self.asker.context_length(target.builds)
        completion = min(line.completion_tokens, context - 1)
        length = min(line.prompt_tokens, context - completion)
        if (length, completion) != (line.prompt_tokens, line.completion_tokens):
            self.num_shortened += 1
        prompt = synthetic_prompt(length, index, self._plain_ids)
        sampling = SamplingParams(max_tokens=completion, temperature=0.0, ignore_eos=True)
        try:
            deadline_s = time.monotonic() + self.options.case_timeout_s
            answer = await self.asker.put(target, prompt, sampling, deadline_s)
        except CaseTimeoutError as error:
            return CaseResult("timeout", str(error))
        except CaseError as error:
            return CaseResult("error", str(error))
        return CaseResult("pass", "answered", answer=answer)

    async def _watch_kv(self) -> None:
        while True:
            shares = await asyncio.gather(*(_kv_usage(r) for r in self.asker.router.replicas))
            known = [share for share in shares if share is not None]
            if known:
                self._kv_usage.append(sum(known) / len(known))
            await asyncio.sleep(KV_INTERVAL_S)


def _plain_ids_of(tokenizer: BaseTokenizer) -> list[int]:
    table = tokenizer.token_bytes
    return [id_ for id_ in range(tokenizer.vocab_size) if table.text_bytes(id_)]


async def _kv_usage(replica: Any) -> float | None:  # noqa: ANN401 (a routing.Replica, or a test's)
    try:
        return float((await replica.client.stats(STATS_TIMEOUT_S)).kv_usage)
    except EngineLostError:
        return None
