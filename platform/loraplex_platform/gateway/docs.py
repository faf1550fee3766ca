"""/docs of the data plane: the control API's page, which loads nothing from anywhere."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from loraplex_platform.control.docs import render

router = APIRouter(include_in_schema=False)

_INTRO = """<p class="quiet">OpenAI's API: set <code>base_url</code> of the official client to
<code>/v1</code> of this server and <code>api_key</code> to a tenant's key
(<code>lpx_sk_...</code>). Errors have OpenAI's shape and a <code>request_id</code>, which equals the
header <code>x-request-id</code>. The machine-readable form of this page is
<a href="/openapi.json">/openapi.json</a>.</p>"""


@router.get("/docs", response_class=HTMLResponse)
async def show_docs(request: Request) -> HTMLResponse:
    """Every route with its parameters and errors."""
    return HTMLResponse(render(request.app.openapi(), _INTRO))
