"""`loraplex verify`: neighbours change nothing, and every token is accounted for.

On the running product, through its public API:
1. alone = crowd: greedy text and log-probabilities of one request per model, asked alone, are bit for bit
   what they are in the middle of 16 mixed requests of all tenants.
2. cold = again: and what they are when asked once more. A random word makes each prompt new to any cache.
3. identity: tokens made by the engines = billed + absorbed + discarded, and the other SQL checks.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Table

from loraplex_platform.admin_client import AdminClient
from loraplex_platform.cli.chat import Answer, ChatClient, Question
from loraplex_platform.local.demo_file import RunningDemo, Target, find_running_demo

CROWD_SIZE = 16
TOP_LOGPROBS = 5
QUIET_DEADLINE_S = 60.0
POLL_INTERVAL_S = 0.2

_PROMPTS = (
    "What is the capital of France?",
    "Name three colours of the rainbow, and say where each is seen.",
    "How do I boil an egg?",
    "Tell me about the sea in two sentences.",
    "What is 7 plus 5?",
)


@dataclass(frozen=True, slots=True)
class Line:
    """One row of the result."""

    title: str
    ok: bool
    detail: str


def run_verify(data_dir: Path, max_tokens: int, console: Console) -> int:
    """Check, print the table, and return 0 only if all is green."""
    demo = find_running_demo(data_dir)
    lines = asyncio.run(_compare(demo, max_tokens, console))
    with AdminClient(demo.control_url, demo.admin_key) as admin:
        lines += _account(admin)
    table = Table("", "check", "detail")
    for line in lines:
        mark = "[green]✓[/green]" if line.ok else "[red]✗[/red]"
        table.add_row(mark, escape(line.title), escape(line.detail))
    console.print(table)
    failed = sum(not line.ok for line in lines)
    if failed:
        console.print(f"[red]{failed} of {len(lines)} checks failed.[/red]")
        return 1
    console.print(f"[green]All {len(lines)} checks are green.[/green]")
    return 0


async def _compare(demo: RunningDemo, max_tokens: int, console: Console) -> list[Line]:
    word = secrets.token_hex(4)
    questions = [
        Question(
            target,
            f"{_PROMPTS[number % len(_PROMPTS)]} (Note {word}-{number}.)",
            max_tokens,
            top_logprobs=TOP_LOGPROBS,
        )
        for number, target in enumerate(_distinct(demo))
    ]
    crowd_size = max(0, CROWD_SIZE - len(questions))
    total = 3 * len(questions) + crowd_size
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
    )
    progress = Progress(*columns, console=console, disable=not console.is_terminal, transient=True)
    async with ChatClient(demo.gateway_url) as client:
        with progress:
            row = progress.add_task("alone", total=total)

            async def ask(question: Question) -> Answer:
                answer = await client.ask(question)
                progress.advance(row)
                return answer

            alone = [await ask(question) for question in questions]
            progress.update(row, description=f"in a crowd of {CROWD_SIZE}")
            others = _crowd(demo, crowd_size, max_tokens)
            # The crowd first: the compared requests then join a batch that is already mixed.
            answers = await asyncio.gather(*(ask(item) for item in [*others, *questions]))
            crowded = answers[len(others) :]
            progress.update(row, description="again")
            again = [await ask(question) for question in questions]
    lines = []
    for question, first, second, third in zip(questions, alone, crowded, again, strict=True):
        label = question.target.label
        lines.append(_same(f"{label}: alone = in a crowd of {CROWD_SIZE}", first, second))
        lines.append(_same(f"{label}: cold = again", first, third))
    return lines


def _distinct(demo: RunningDemo) -> list[Target]:
    """Every deployment, and the base once."""
    found: dict[str, Target] = {}
    for target in demo.targets:
        key = target.model if target.model == demo.base_model else target.label
        found.setdefault(key, target)
    return list(found.values())


def _crowd(demo: RunningDemo, size: int, max_tokens: int) -> list[Question]:
    """Requests of all models, short and long, greedy and sampled."""
    questions = []
    for number in range(size):
        target = demo.targets[number % len(demo.targets)]
        content = " ".join([_PROMPTS[number % len(_PROMPTS)]] * (1 + number % 4))
        question = Question(target, content, max_tokens + 4 * number)
        if number % 2:
            question = replace(question, temperature=0.9, seed=number)
        questions.append(question)
    return questions


def _same(title: str, first: Answer, second: Answer) -> Line:
    if first.text != second.text:
        return Line(title, False, f"{first.text!r} became {second.text!r}")
    difference = _largest_difference(first.logprobs, second.logprobs)
    if first.logprobs is None or first.logprobs != second.logprobs:
        return Line(title, False, f"same text, but log-probabilities differ by {difference}")
    return Line(title, True, f"{first.completion_tokens} tokens, log-probabilities equal")


def _largest_difference(first: Any, second: Any) -> float | None:  # noqa: ANN401 - the API's JSON
    try:
        pairs = zip(first["content"], second["content"], strict=True)
        return float(max(abs(a["logprob"] - b["logprob"]) for a, b in pairs))
    except (TypeError, KeyError, ValueError):
        return None


def _account(admin: AdminClient) -> list[Line]:
    """The identity and the other checks, once every request has been settled and landed."""
    report = wait_until_quiet(admin)
    identity = report["identity"]
    parts = ("billed", "absorbed", "discarded_past_stop", "discarded_past_abort")
    summed = " + ".join(f"{identity[part]} {part.replace('_', ' ')}" for part in parts)
    is_quiet = identity["pending_requests"] == 0 and not identity["unlanded"]
    lines = [
        Line(
            "identity: generated = billed + absorbed + discarded",
            is_quiet and identity["difference"] == 0,
            f"{identity['generated']} generated = {summed}; difference {identity['difference']}"
            + ("" if is_quiet else f"; {identity['pending_requests']} requests still pending"),
        )
    ]
    lines += [
        Line(check["title"], bool(check["ok"]), str(check.get("detail") or ""))
        for check in report["checks"]
    ]
    return lines


def wait_until_quiet(admin: AdminClient) -> dict[str, Any]:
    """The invariants once nothing is pending, or as they are at the deadline."""
    deadline = time.monotonic() + QUIET_DEADLINE_S
    while True:
        report = admin.invariants()
        identity = report["identity"]
        is_quiet = identity["pending_requests"] == 0 and not identity["unlanded"]
        if (is_quiet and identity["difference"] == 0) or time.monotonic() > deadline:
            return report
        time.sleep(POLL_INTERVAL_S)
