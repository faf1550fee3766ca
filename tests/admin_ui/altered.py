"""The control API between it and the console, changed on its way: refusing, away, or with hostile words in every answer.

`Altered` is a transport of the console's client, for Streamlit's test driver; `altered_api` the same behind a port, for
a console in a browser. What is changed is the real API's answer, so that no page meets a shape that there is not.
"""

from __future__ import annotations

import itertools
import json
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

import httpx

_SESSION: Final = "/admin/v1/sessions/current"
# Which values are not words that somebody chose: ids, numbers, hashes, what the API defines itself.
_DEFINED: Final = re.compile(
    r"[a-z]{2,5}_[0-9a-f]{32}|-?\d+(\.\d+)?|(sha256:)?[0-9a-f]{8,}|[a-z][a-z_]{0,24}|[a-z]{2}\.[a-z]+"
)
_DEFINED_FIELDS: Final = frozenset(
    {
        *("object", "status", "state", "kind", "role", "metric", "period", "unit", "currency"),
        *("slug", "billing_tz", "timezone", "month", "topic", "topics", "actions", "action"),
        *("scope_kind", "object_kind", "actor_kind", "target_kind", "price_class", "mode"),
        *("first_id", "last_id", "next_page", "version", "hash", "prev_hash", "cron", "day"),
        *(
            "created_on",
            "decision",
            "cidr",
            "replica_id",
            "gateway_id",
            "outcome",
            "result",
            "type",
        ),
    }
)
_DROPPED: Final = frozenset(
    {"content-length", "transfer-encoding", "content-encoding", "connection"}
)


class Altered(httpx.BaseTransport):
    """What the control API says, changed. Who is logged in stays what it is, unless it is away.

    Attributes:
        refusal: the status of every answer; None: what it says itself.
        is_away: connections are refused.
        loses_answers: what is asked is done, and nobody hears of it.
        texts: what stands in every answer in place of what people have written there, in turns; empty: nothing does.
        num_changed: how many values were.
    """

    def __init__(self) -> None:
        self.refusal: int | None = None
        self.is_away = False
        self.loses_answers = False
        self.texts: Sequence[str] = ()
        self.num_changed = 0
        self._inner = httpx.HTTPTransport()

    def close(self) -> None:
        """Close the connections."""
        self._inner.close()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if self.is_away:
            raise httpx.ConnectError("connection refused", request=request)
        is_session = request.url.path == _SESSION
        if self.refusal is not None and not is_session:
            return httpx.Response(self.refusal, json={"error": self._error()})
        answer = self._inner.handle_request(request)
        if self.loses_answers and request.method != "GET":
            answer.read()
            raise httpx.ReadError("connection reset", request=request)
        kind = answer.headers.get("content-type", "")
        if not self.texts or is_session or not kind.startswith("application/json"):
            return answer
        found = json.loads(answer.read())
        headers = {k: v for k, v in answer.headers.items() if k not in _DROPPED}
        changed = self._changed(found, itertools.cycle(self.texts), "")
        return httpx.Response(answer.status_code, headers=headers, json=changed)

    def _error(self) -> dict[str, Any]:
        message = f"Refused **for** <b>a test</b>: {self.refusal}."
        return {"message": message, "type": "t", "param": "field_x", "code": "made_up"}

    def _changed(self, value: Any, texts: Iterator[str], name: str) -> Any:
        if isinstance(value, dict):
            return {key: self._changed(one, texts, key) for key, one in value.items()}
        if isinstance(value, list):
            return [self._changed(one, texts, name) for one in value]
        if not isinstance(value, str) or name in _DEFINED_FIELDS:
            return value
        is_name = name in ("name", "email", "description", "reason", "slug", "url", "model")
        if name.endswith("_id") or name == "id" or (_DEFINED.fullmatch(value) and not is_name):
            return value
        self.num_changed += 1
        return next(texts)


@contextmanager
def altered_api(control_url: str) -> Iterator[tuple[Altered, str]]:
    """A control API that a browser's console can be pointed at, and its URL; see `Altered`."""
    altered = Altered()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _pass(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            headers = {k: v for k, v in self.headers.items() if k.lower() not in _DROPPED}
            request = httpx.Request(
                self.command, f"{control_url}{self.path}", headers=headers, content=body
            )
            try:
                answer = altered.handle_request(request)
                content = answer.read()
            except httpx.TransportError:
                self.close_connection = True
                return
            self.send_response(answer.status_code)
            for key, value in answer.headers.multi_items():
                if key.lower() not in (*_DROPPED, "date", "server"):
                    self.send_header(key, value)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _pass  # noqa: N815 - http.server's names

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, name="altered API", daemon=True)
    thread.start()
    try:
        yield altered, f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
        altered.close()
