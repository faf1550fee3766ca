"""/docs: the OpenAPI document as one page that needs no script and nothing from outside."""

from __future__ import annotations

import html
import json
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from loraplex_platform.control.style import STYLE

router = APIRouter(include_in_schema=False)

_INTRO = """<p class="quiet">Every request is authorised by an admin key
(<code>Authorization: Bearer lpx_ak_...</code>) or a console session. Errors have one shape,
<code>{"error": {"message", "type", "param", "code"}}</code>; lists are paged with <code>limit</code>
and <code>after</code>; POSTs take an <code>Idempotency-Key</code>. The machine-readable form of this
page is <a href="/openapi.json">/openapi.json</a>.</p>"""


@router.get("/docs", response_class=HTMLResponse)
async def show_docs(request: Request) -> HTMLResponse:
    """Every route with its parameters and examples."""
    return HTMLResponse(render(request.app.openapi()))


def render(document: dict[str, Any], intro: str = _INTRO) -> str:
    """The page for an OpenAPI document; `intro` is HTML."""
    sections: dict[str, list[str]] = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            tag = (operation.get("tags") or ["Other"])[0]
            sections.setdefault(tag, []).append(_operation(document, method, path, operation))
    body = "".join(f"<h2>{html.escape(tag)}</h2>{''.join(ops)}" for tag, ops in sections.items())
    title = html.escape(document["info"]["title"])
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f'<title>{title}</title><style>{STYLE}</style></head><body><main class="page">'
        f"<h1>{title}</h1>{intro}{body}</main></body></html>"
    )


def _operation(document: dict[str, Any], method: str, path: str, operation: dict[str, Any]) -> str:
    description = operation.get("description") or operation.get("summary") or ""
    parts = [f"<p>{html.escape(part)}</p>" for part in description.split("\n\n") if part]
    parts.append(_parameters(operation.get("parameters") or []))
    for kind, content in (operation.get("requestBody") or {}).get("content", {}).items():
        parts.append(f"<p>Body, <code>{html.escape(kind)}</code>:</p>")
        parts.append(_schema(_resolved(document, content.get("schema") or {})))
    rows = "".join(
        f"<tr><th>{html.escape(status)}</th><td>{html.escape(response['description'])}</td></tr>"
        for status, response in operation["responses"].items()
    )
    summary = html.escape(description.split("\n")[0])
    return (
        f'<details><summary><span class="verb">{method.upper()}</span>'
        f'<code>{html.escape(path)}</code> <span class="quiet">{summary}</span></summary>'
        f"{''.join(parts)}<table>{rows}</table></details>"
    )


def _parameters(parameters: list[dict[str, Any]]) -> str:
    rows = []
    for parameter in parameters:
        where = parameter["in"] + (", required" if parameter.get("required") else "")
        about = html.escape(parameter.get("description") or "")
        rows.append(
            f"<tr><th><code>{html.escape(parameter['name'])}</code></th>"
            f"<td>{where}</td><td>{about}</td></tr>"
        )
    return f"<table>{''.join(rows)}</table>" if rows else ""


def _schema(schema: dict[str, Any]) -> str:
    rows = []
    for name, field in (schema.get("properties") or {}).items():
        required = "required" if name in schema.get("required", []) else "optional"
        about = html.escape(field.get("description") or "")
        rows.append(
            f"<tr><th><code>{html.escape(name)}</code></th><td>{required}</td><td>{about}</td></tr>"
        )
    table = f"<table>{''.join(rows)}</table>" if rows else ""
    examples = "".join(
        f"<pre>{html.escape(json.dumps(example, indent=2))}</pre>"
        for example in schema.get("examples") or []
    )
    return table + examples


def _resolved(document: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    reference = schema.get("$ref")
    if reference is None:
        return schema
    resolved: dict[str, Any] = document["components"]["schemas"][reference.rpartition("/")[2]]
    return resolved
