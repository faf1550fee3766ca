"""`loraplex playground`: what a tenant's model ids say to the same prompt, side by side, as the console's page does."""

from __future__ import annotations

import threading
import time
from dataclasses import asdict, dataclass
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loraplex_platform.cli.deployment_commands import revision_named, where_answered
from loraplex_platform.cli.errors import EXIT_FAILED, CommandError
from loraplex_platform.cli.options import ControlUrlOption, DataDirOption, TenantOption, open_admin
from loraplex_platform.cli.output import JsonOption, print_json, printable

if TYPE_CHECKING:
    from rich.table import Table

    from loraplex_platform.admin_client import AdminClient

MAX_BESIDE_BASE = 2
_REDRAWS_PER_S = 12


@dataclass(slots=True)
class Answer:
    """What one side has said so far; `model` as it was asked for, `base` or NAME[@REVISION]."""

    asked: str
    model: str
    revision_id: str | None
    text: str = ""
    finish_reason: str | None = None
    request_id: str | None = None
    usage: dict[str, Any] | None = None
    seconds: float = 0.0
    cost_usd: str | None = None  # as it is on the books
    error: str | None = None


def playground(
    prompt: Annotated[str, typer.Argument(help="What to ask.")],
    tenant: TenantOption,
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL[@REVISION]]...",
            help="Up to two model ids of the tenant, each with a revision's number or id if not its current one is meant.",
            show_default="the base alone",
        ),
    ] = None,
    base: Annotated[
        bool, typer.Option("--base/--no-base", help="Ask the base model beside them.")
    ] = True,
    max_tokens: Annotated[int, typer.Option(min=1, max=4096, help="Most tokens per answer.")] = 128,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0: the likeliest words.")] = 0.0,
    as_json: JsonOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Ask the base and up to two revisions the same thing, and watch the answers stream side by side.

    Each answer is a request of the tenant's: within its limits, at its prices, on its next invoice. A revision that is
    named answers here alone, whatever pins and rollouts say. Exit status 1 if one of them fails.

    Examples:

      loraplex playground "What is the capital of France?" capitals --tenant acme

      loraplex playground "Write a haiku." poet poet@2 -t acme --no-base --json
    """
    wanted = models or []
    if len(wanted) > MAX_BESIDE_BASE:
        raise typer.BadParameter(
            f"ask {MAX_BESIDE_BASE} at most beside the base", param_hint="MODEL"
        )
    if not (wanted or base):
        raise typer.BadParameter("name a model id, or leave --no-base out", param_hint="MODEL")
    if not prompt.strip():
        raise typer.BadParameter("write something to ask", param_hint="PROMPT")
    with open_admin(data_dir, control_url) as admin:
        tenant_id = str(admin.tenant(tenant)["id"])
        answers = _asked(admin, tenant_id, wanted, with_base=base)
        question = {
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "temperature": temperature,
        }
        _ask_all(admin, tenant_id, question, answers, is_shown=not as_json)
    if as_json:
        print_json([asdict(answer) for answer in answers])
    if any(answer.error is not None for answer in answers):
        raise typer.Exit(EXIT_FAILED)


def _asked(
    admin: AdminClient, tenant_id: str, wanted: list[str], *, with_base: bool
) -> list[Answer]:
    from loraplex_platform.admin_client import AdminApiError

    found: list[Answer] = []
    bases: list[str] = []
    for text in wanted:
        name, mark, revision = text.partition("@")
        if not name or (mark and not revision):
            raise CommandError(f"{text}: write MODEL or MODEL@REVISION")
        try:
            where = where_answered(admin, tenant_id, name)
            revision_id = revision_named(admin, where, revision) if mark else None
            if with_base and not bases:
                bases.append(str(admin.read(where)[0]["base_model"]))
        except AdminApiError as error:
            raise CommandError(f"{text}: {error}") from error
        found.append(Answer(text, name, revision_id))
    if with_base:
        # What they are made of, else the newest.
        bases += [str(one["name"]) for one in admin.pages("/base-models")] if not bases else []
        if not bases:
            raise CommandError("no base model is registered yet: is the control API up?")
        found.insert(0, Answer("base", bases[0], None))
    return found


def _ask_all(
    admin: AdminClient,
    tenant_id: str,
    question: dict[str, Any],
    answers: list[Answer],
    *,
    is_shown: bool,
) -> None:
    # A thread each: two answers must not wait for each other. They end with the process if it is interrupted.
    threads = [
        threading.Thread(target=_ask, args=(admin, tenant_id, question, answer), daemon=True)
        for answer in answers
    ]
    for thread in threads:
        thread.start()
    if is_shown:
        _show(threads, answers)
    for thread in threads:
        thread.join()


def _ask(admin: AdminClient, tenant_id: str, question: dict[str, Any], answer: Answer) -> None:
    from loraplex_platform.admin_client import AdminApiError

    began_s = time.monotonic()
    body = question | {"model": answer.model}
    if answer.revision_id is not None:
        body["revision_id"] = answer.revision_id
    try:
        for frame in admin.chat(tenant_id, body):
            answer.request_id = f"req_{str(frame['id']).rpartition('-')[2]}"
            answer.usage = frame.get("usage") or answer.usage
            for choice in frame["choices"]:
                answer.text += choice["delta"].get("content") or ""
                answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
            answer.seconds = round(time.monotonic() - began_s, 3)
        # The books have it: the request was settled before its answer ended.
        answer.cost_usd = _cost(admin, answer)
    except AdminApiError as error:
        answer.error = str(error)
    except (KeyError, TypeError, ValueError) as error:
        answer.error = f"what answers is no chat ({type(error).__name__})"
    except BaseException as error:
        answer.error = f"the question failed here ({type(error).__name__})"
        raise


def _cost(admin: AdminClient, answer: Answer) -> str | None:
    if answer.request_id is None:
        return None
    found = admin.call("GET", f"/explain/{answer.request_id}")["answered_by"]
    if found is None:
        return None
    lines = (line for line in found["ledger"] if line["account"] == "revenue")
    return str(sum((Decimal(line["amount_usd"]) for line in lines), Decimal(0)))


def _show(threads: list[threading.Thread], answers: list[Answer]) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False)
    if not console.is_terminal:
        for thread, answer in zip(threads, answers, strict=True):
            thread.join()
            if answer.error is None:
                typer.echo(f"{answer.asked}: {printable(answer.text)}")
            else:
                typer.echo(f"{answer.asked}: {printable(answer.error)}", err=True)
        return
    with Live(_side_by_side(answers), console=console, auto_refresh=False) as live:
        while any(thread.is_alive() for thread in threads):
            time.sleep(1 / _REDRAWS_PER_S)
            live.update(_side_by_side(answers), refresh=True)
        live.update(_side_by_side(answers), refresh=True)


def _side_by_side(answers: list[Answer]) -> Table:
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(expand=True)
    for _ in answers:
        grid.add_column(ratio=1)
    grid.add_row(
        *(
            Panel(
                # Text as it is, never as markup: a model may write anything.
                Text("\n".join(map(printable, answer.text.strip().splitlines())))
                if answer.error is None
                else Text(printable(answer.error), style="red"),
                title=Text(printable(answer.asked)),
                subtitle=_figures(answer),
                border_style="dim" if answer.asked == "base" else "cyan",
            )
            for answer in answers
        )
    )
    return grid


def _figures(answer: Answer) -> str | None:
    if answer.usage is None:
        return None
    cost = "" if answer.cost_usd is None else f" · ${answer.cost_usd}"
    return f"{answer.usage['completion_tokens']} tokens · {answer.seconds:.1f} s{cost}"
