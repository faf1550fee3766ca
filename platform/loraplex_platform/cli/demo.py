"""`loraplex demo`: what the product is for, on the running product, in a minute.

1. One question to every model of both tenants and to the base at once, streamed side by side.
2. The same requests one by one and all at once: tokens per second, and the ratio.
3. The bill, from the usage API. 4. The engine's own count of steps that held several adapters and the base.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Table
from rich.text import Text

from loraplex_platform.admin_client import AdminClient
from loraplex_platform.cli.chat import Answer, ChatClient, Question
from loraplex_platform.cli.verify import wait_until_quiet
from loraplex_platform.local.demo_file import RunningDemo, Target, find_running_demo

QUESTION = "What is the capital of France?"
SPEED_QUESTIONS = (
    "What is the capital of Italy?",
    "How do I boil an egg?",
    "Why is the sky blue?",
)
SECONDS_PER_DAY = 86_400


def run_demo(data_dir: Path, max_tokens: int, console: Console) -> int:
    """Show all four parts; 0 unless something failed."""
    demo = find_running_demo(data_dir)
    with AdminClient(demo.control_url, demo.admin_key) as admin:
        before = _mixed_steps(admin)
        asyncio.run(_side_by_side(demo, max_tokens, console))
        asyncio.run(_speed(demo, max_tokens, console))
        wait_until_quiet(admin)
        _bill(demo, admin, console)
        _batch(admin, before, console)
    return 0


# ---------------------------------------------------------------------------- 1: side by side


async def _side_by_side(demo: RunningDemo, max_tokens: int, console: Console) -> None:
    console.rule("[bold]1  One batch, five answers")
    console.print(f"Everyone asks at once: [bold]{QUESTION}[/bold]\n")
    texts = {target.label: "" for target in demo.targets}
    questions = [Question(target, QUESTION, max_tokens) for target in demo.targets]
    async with ChatClient(demo.gateway_url) as client:
        if not console.is_terminal:
            answers = await asyncio.gather(*(client.stream(item, _ignore) for item in questions))
            for target, answer in zip(demo.targets, answers, strict=True):
                console.print(
                    Text(f"{target.label}: {' '.join(answer.text.split())}"), soft_wrap=True
                )
            return
        with Live(_panels(demo, texts), console=console, refresh_per_second=12) as live:

            async def show(question: Question) -> None:
                def on_text(piece: str) -> None:
                    texts[question.target.label] += piece
                    live.update(_panels(demo, texts))

                await client.stream(question, on_text)

            await asyncio.gather(*(show(question) for question in questions))


def _panels(demo: RunningDemo, texts: dict[str, str]) -> Table:
    grid = Table.grid(expand=True)
    for _ in demo.targets:
        grid.add_column(ratio=1)
    grid.add_row(
        *(
            Panel(
                Text(texts[target.label].strip()),
                title=_title(demo, target),
                border_style="dim" if target.model == demo.base_model else "cyan",
            )
            for target in demo.targets
        )
    )
    return grid


def _title(demo: RunningDemo, target: Target) -> str:
    name = "base" if target.model == demo.base_model else target.model
    return f"{escape(target.tenant)} [bold]{escape(name)}[/bold]"


def _ignore(_piece: str) -> None:
    """Text that is shown when it is whole."""


# ---------------------------------------------------------------------------- 2: speed


async def _speed(demo: RunningDemo, max_tokens: int, console: Console) -> None:
    console.rule("[bold]2  One by one, and all at once")
    questions = [
        Question(target, content, max_tokens)
        for content in SPEED_QUESTIONS
        for target in demo.targets
    ]
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
    )
    progress = Progress(*columns, console=console, disable=not console.is_terminal, transient=True)
    async with ChatClient(demo.gateway_url) as client:
        with progress:
            row = progress.add_task("one by one", total=2 * len(questions))

            async def ask(question: Question) -> Answer:
                answer = await client.ask(question)
                progress.advance(row)
                return answer

            # One to warm up, so that neither side pays for loading adapters.
            await client.ask(replace(questions[0], max_tokens=1))
            started = time.monotonic()
            one_by_one = [await ask(question) for question in questions]
            single_s = time.monotonic() - started
            progress.update(row, description="all at once")
            started = time.monotonic()
            at_once = await asyncio.gather(*(ask(question) for question in questions))
            batch_s = time.monotonic() - started
    single_tokens = sum(answer.completion_tokens for answer in one_by_one)
    batch_tokens = sum(answer.completion_tokens for answer in at_once)
    is_same = [answer.text for answer in one_by_one] == [answer.text for answer in at_once]
    table = Table("", "requests", "tokens", "seconds", "tokens/s")
    for name, tokens, seconds in (
        ("one by one", single_tokens, single_s),
        ("all at once", batch_tokens, batch_s),
    ):
        table.add_row(
            name, str(len(questions)), str(tokens), f"{seconds:.1f}", f"{tokens / seconds:.1f}"
        )
    console.print(table)
    ratio = (batch_tokens / batch_s) / (single_tokens / single_s)
    console.print(
        f"At once is [bold]{ratio:.1f} times[/bold] as fast, and the answers are "
        + ("the same, letter for letter." if is_same else "[red]not the same[/red].")
    )


# ---------------------------------------------------------------------------- 3: the bill


def _bill(demo: RunningDemo, admin: AdminClient, console: Console) -> None:
    console.rule("[bold]3  The bill of today")
    today = int(time.time()) // SECONDS_PER_DAY * SECONDS_PER_DAY
    rows = admin.usage(today, today + SECONDS_PER_DAY, ["tenant_id", "model"])
    slugs = {target.tenant_id: target.tenant for target in demo.targets}
    table = Table("tenant", "model", "requests", "prompt", "completion", "US dollars")
    total: dict[str, Any] = {"requests": 0, "prompt_tokens": 0, "completion_tokens": 0}
    cost_usd = 0.0
    for item in sorted(rows, key=lambda row: (str(row.get("tenant")), str(row.get("model")))):
        if item["tenant_id"] not in slugs:
            continue
        table.add_row(
            slugs[item["tenant_id"]],
            str(item["model"]),
            *(str(item[key]) for key in total),
            item["cost_usd"],
        )
        cost_usd += float(item["cost_usd"])
        for key in total:
            total[key] += item[key]
    table.add_section()
    table.add_row("total", "", *(str(value) for value in total.values()), f"{cost_usd:.12f}")
    console.print(table)


# ---------------------------------------------------------------------------- 4: the batch


def _mixed_steps(admin: AdminClient) -> int:
    return sum(stats["mixed_steps_total"] for stats in _stats(admin))


def _batch(admin: AdminClient, before: int, console: Console) -> None:
    console.rule("[bold]4  One continuous batch")
    mixed = _mixed_steps(admin) - before
    most = max((stats["max_adapters_in_step"] for stats in _stats(admin)), default=0)
    console.print(
        f"[bold]{mixed}[/bold] steps of this demo held at least two adapters and the base at once "
        f"(loraplex mixed_steps_total); the most adapters in one step so far: [bold]{most}[/bold]."
    )


def _stats(admin: AdminClient) -> list[dict[str, Any]]:
    return [item["stats"] for item in admin.fleet()["replicas"] if item.get("stats")]
