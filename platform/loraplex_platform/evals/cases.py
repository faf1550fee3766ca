"""One case of a run: ask the revision, gather what its checks need, decide."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from loraplex_engine.protocol import SamplingParams

from loraplex_platform.evals import checks as kinds
from loraplex_platform.evals import scoring
from loraplex_platform.evals.asking import (
    Asker,
    CaseError,
    CaseTimeoutError,
    TargetError,
    bits_of,
    build_of,
)
from loraplex_platform.evals.checks import (
    CaseStatus,
    Evidence,
    Judge,
    JudgeCheck,
    PairwiseCheck,
    ReferenceCheck,
    Reply,
    Unknown,
    Verdict,
)
from loraplex_platform.evals.records import Target
from loraplex_platform.evals.suites import Case
from loraplex_platform.fleet.absorbed import Answer
from loraplex_platform.gateway.chat_message import ChatMessage

FindModel = Callable[[str], Awaitable[Target | None]]


@dataclass(slots=True)
class CaseResult:
    """What a case's row keeps."""

    status: CaseStatus
    reason: str
    verdicts: list[dict[str, Any]] = field(default_factory=list)
    output: str | None = None
    baseline_output: str | None = None
    answer: Answer | None = None

    def to_row(self) -> dict[str, Any]:
        """Columns of `eval_results`."""
        row: dict[str, Any] = {
            "status": self.status,
            "reason": _storable(self.reason),
            "checks": {"checks": self.verdicts},
            "output": _storable(self.output),
            "baseline_output": _storable(self.baseline_output),
        }
        answer = self.answer
        if answer is not None:
            row |= {
                "bits_sha256": bits_of(answer),
                "build_sha256": build_of(answer.replica, answer.fingerprint),
                "mean_logprob": mean_logprob(answer),
                "prompt_tokens": None if answer.usage is None else answer.usage.prompt_tokens,
                "completion_tokens": len(answer.token_ids),
                "finish_reason": answer.finish_reason,
                "ttft_ms": answer.ttft_ms,
                "e2e_ms": answer.e2e_ms,
                "fingerprint": answer.fingerprint,
                "replica_id": answer.replica.replica_id,
                "request_id": answer.request_id,
            }
        return row


@dataclass(frozen=True, slots=True)
class CaseRunner:
    """Runs the cases of one run. `find_model`: what a judge's name stands for."""

    asker: Asker
    target: Target
    baseline: Target | None
    timeout_s: float
    find_model: FindModel

    async def run(self, case: Case) -> CaseResult:
        """Never raises for what is the case's, the revision's or an engine's fault.

        Raises:
            PlatformError: the whole run cannot go on (the tenant is suspended, no database).
        """
        deadline_s = time.monotonic() + self.timeout_s
        try:
            answer = await self._ask(self.target, case, deadline_s)
        except CaseTimeoutError as error:
            return CaseResult("timeout", str(error))
        except TargetError as error:
            return CaseResult("fail", str(error))
        except CaseError as error:
            return CaseResult("error", str(error))
        result = CaseResult("error", "", output=self.asker.text_of(answer), answer=answer)
        try:
            evidence = await self._gather(case, result, deadline_s)
        except CaseTimeoutError as error:
            result.status, result.reason = "timeout", str(error)
            return result
        # In a thread: a check may take milliseconds, and the worker has other loops.
        verdicts = await asyncio.to_thread(_judge, case, evidence)
        decided = kinds.decide(verdicts)
        result.status, result.reason = decided.status, decided.reason
        result.verdicts = [
            {"type": check.type, "status": verdict.status, "reason": _storable(verdict.reason)}
            for check, verdict in zip(case.checks, verdicts, strict=True)
        ]
        return result

    async def _ask(self, target: Target, case: Case, deadline_s: float) -> Answer:
        prompt_ids = await self._prompt_of(target, case)
        params = case.params
        sampling = SamplingParams(
            max_tokens=params.max_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            seed=params.seed,
            stop_token_ids=self.asker.tokenizer.end_token_ids,
            logprobs=0,
        )
        return await self.asker.put(target, prompt_ids, sampling, deadline_s)

    async def _prompt_of(self, target: Target, case: Case) -> list[int]:
        messages = None
        if case.messages is not None:
            messages = [ChatMessage(turn.role, turn.content) for turn in case.messages]
            system = target.params.get("system_prompt")
            if isinstance(system, str) and messages[0].role != "system":
                messages.insert(0, ChatMessage("system", system))
        return await self.asker.encode(messages, case.prompt)

    async def _gather(self, case: Case, result: CaseResult, deadline_s: float) -> Evidence:
        output = result.output or ""
        if self.baseline is not None and any(
            isinstance(check, PairwiseCheck) for check in case.checks
        ):
            try:
                baseline = await self._ask(self.baseline, case, deadline_s)
                result.baseline_output = self.asker.text_of(baseline)
            except CaseError:
                result.baseline_output = None  # its checks say that there is none
        replies: dict[int, Reply] = {}
        own: dict[int, Any] = {}
        theirs: dict[int, Any] = {}
        for index, check in enumerate(case.checks):
            if isinstance(check, JudgeCheck):
                values = _places(case, check.judge_model, output, result.baseline_output)
                template = check.judge_model.template or kinds.DEFAULT_JUDGE_TEMPLATE
                prompts = [kinds.fill(template, values)]
                replies[index] = await self._replies(check.judge_model, prompts, deadline_s)
            elif isinstance(check, PairwiseCheck) and check.judge_model is not None:
                if result.baseline_output is None:
                    continue
                template = check.judge_model.template or kinds.DEFAULT_PAIR_TEMPLATE
                prompts = [
                    kinds.fill(template, _places(case, check.judge_model, first, second))
                    for first, second in (
                        (output, result.baseline_output),
                        (result.baseline_output, output),
                    )
                ]
                replies[index] = await self._replies(check.judge_model, prompts, deadline_s)
            elif isinstance(check, ReferenceCheck):
                own[index] = await self._score(self.target, case, check.reference, deadline_s)
                if check.max_drop is not None and self.baseline is not None:
                    theirs[index] = await self._score(
                        self.baseline, case, check.reference, deadline_s
                    )
        return Evidence(
            output=output,
            baseline_output=result.baseline_output,
            replies=replies,
            reference_logprobs=own,
            baseline_logprobs=theirs,
        )

    async def _score(
        self, target: Target, case: Case, reference: str, deadline_s: float
    ) -> Sequence[float] | Unknown:
        try:
            prompt_ids = await self._prompt_of(target, case)
            [reference_ids] = await self.asker.tokenizer.encode_plain([reference])
            return await scoring.reference_logprobs(
                self.asker, target, prompt_ids, reference_ids, deadline_s
            )
        except CaseError as error:
            return Unknown(str(error))

    async def _replies(self, judge: Judge, prompts: list[str], deadline_s: float) -> Reply:
        target = await self.find_model(judge.model)
        if target is None:
            return Reply(failure=f"there is no model {judge.model}")
        texts = []
        sampling = SamplingParams(
            max_tokens=judge.max_tokens,
            temperature=0.0,
            stop_token_ids=self.asker.tokenizer.end_token_ids,
        )
        try:
            for prompt in prompts:
                ids = await self.asker.encode([ChatMessage("user", prompt)], prompt)
                texts.append(
                    self.asker.text_of(await self.asker.put(target, ids, sampling, deadline_s))
                )
        except CaseError as error:
            return Reply(failure=str(error))
        return Reply(tuple(texts))


def mean_logprob(answer: Answer) -> float | None:
    """Per token, in nats; None of an answer without tokens, or where one is not finite."""
    if not answer.logprobs:
        return None
    mean = math.fsum(answer.logprobs) / len(answer.logprobs)
    return mean if math.isfinite(mean) else None


def _judge(case: Case, evidence: Evidence) -> list[Verdict]:
    return [check.judge(evidence, index) for index, check in enumerate(case.checks)]


def _places(case: Case, judge: Judge, answer: str, baseline: str | None) -> dict[str, str]:
    return {
        "question": case.question,
        "answer": answer,
        "baseline": baseline or "",
        "reference": judge.reference,
    }


def _storable(text: str | None) -> str | None:
    """Postgres' text holds no NUL, and a model may say one."""
    return None if text is None else text.replace("\0", "\ufffd")
