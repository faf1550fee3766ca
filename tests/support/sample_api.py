"""A server that answers every route of an OpenAPI document with a sample of what the document says.

For tests that ask which routes a client uses, and whether it can read what they answer, of all routes at once: what a
route really does is tested with the real API.

    with SampleApi(app.openapi()) as api:
        ...                                 # a client of api.url
        assert ("GET", "/admin/v1/tenants") in api.asked
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

# What every string is, so that whatever is looked up by it is found.
TEXT = "1"
# Of the states that a client may wait for, those that end the waiting.
_ENDS = ("succeeded", "completed", "passed", "promoted", "ready")
_METHODS = ("get", "post", "put", "patch", "delete")


class SampleApi:
    """See the module's header.

    Args:
        fixed: values of fields, by their names: where the document says only that there is an object.

    Attributes:
        asked: (method, path as the document has it) of all that was asked.
        unknown: what was asked and is in no document.
    """

    def __init__(self, document: Mapping[str, Any], fixed: Mapping[str, Any] | None = None) -> None:
        self._fixed = {"next_page": None, **(fixed or {})}
        self._schemas = document.get("components", {}).get("schemas", {})
        self._operations = {
            (method.upper(), path): operations[method]
            for path, operations in document["paths"].items()
            for method in _METHODS
            if method in operations
        }
        # The path with fewer placeholders is meant: /limits/effective, not /limits/{limit_id}.
        self._patterns = sorted(
            (
                (re.compile(re.sub(r"\{[^}]+\}", "[^/]+", path) + "$"), (method, path))
                for method, path in self._operations
            ),
            key=lambda entry: entry[1][1].count("{"),
        )
        self.asked: set[tuple[str, str]] = set()
        self.unknown: set[tuple[str, str]] = set()
        api = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            # An answer goes out in one piece, and nobody waits for its second one.
            wbufsize = -1
            disable_nagle_algorithm = True

            def _answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                if self.headers.get("transfer-encoding") == "chunked":
                    body = self._chunks()
                status, kind, content = api._answer(self.command, urlsplit(self.path).path)
                self.send_response(status)
                self.send_header("content-type", kind)
                self.send_header("content-length", str(len(content)))
                self.send_header("etag", '"1"')
                # As uploads that can go on are told how much is there.
                already = int(self.headers.get("upload-offset") or 0)
                self.send_header("upload-offset", str(already + len(body)))
                self.end_headers()
                self.wfile.write(content)

            def _chunks(self) -> bytes:
                parts = []
                while size := int(self.rfile.readline(), 16):
                    parts.append(self.rfile.read(size))
                    self.rfile.readline()
                self.rfile.readline()
                return b"".join(parts)

            def log_message(self, *_: object) -> None:
                pass

        for method in _METHODS:
            setattr(Handler, f"do_{method.upper()}", Handler._answer)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    @property
    def routes(self) -> set[tuple[str, str]]:
        """All of the document's."""
        return set(self._operations)

    def answer_of(self, method: str, path: str, field: str | None = None) -> Any:
        """A sample of what a route answers, or of one object in a list of it."""
        value = self._schema_of(self._operations[method, path])
        if field is not None:
            value = self._resolved(value).get("properties", {}).get(field, {}).get("items", {})
        return self.sample(value)

    def _resolved(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        while "$ref" in schema:
            schema = self._schemas[schema["$ref"].rpartition("/")[2]]
        return schema

    @staticmethod
    def _schema_of(operation: Mapping[str, Any]) -> Mapping[str, Any]:
        response = next(one for code, one in operation["responses"].items() if code < "300")
        found: Mapping[str, Any] = (
            response.get("content", {}).get("application/json", {}).get("schema", {})
        )
        return found

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _answer(self, method: str, path: str) -> tuple[int, str, bytes]:
        for pattern, key in self._patterns:
            if key[0] == method and pattern.match(path):
                self.asked.add(key)
                return self._sample_of(self._operations[key])
        self.unknown.add((method, path))
        return 404, "application/json", b'{"error": {"message": "no such route"}}'

    def _sample_of(self, operation: Mapping[str, Any]) -> tuple[int, str, bytes]:
        (status, response) = next(
            (code, response) for code, response in operation["responses"].items() if code < "300"
        )
        content = response.get("content", {})
        if not content:
            return int(status), "application/json", b""
        kind = next(iter(content))
        if kind == "text/event-stream":
            return int(status), kind, b"data: [DONE]\n\n"
        if kind != "application/json":
            return int(status), kind, b"a document"
        value = self.sample(self._schema_of(operation))
        return int(status), kind, json.dumps(value).encode()

    def sample(self, schema: Mapping[str, Any], name: str = "") -> Any:
        """A value of the schema: all fields there, and no page after it."""
        if name in self._fixed:
            return self._fixed[name]
        schema = self._resolved(schema)
        for word in ("anyOf", "oneOf"):
            if word in schema:
                kinds = [one for one in schema[word] if one.get("type") != "null"]
                return self.sample(kinds[0], name)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            ends = [value for value in _ENDS if value in schema["enum"]]
            return (ends or schema["enum"])[0]
        kind = schema.get("type")
        if kind == "object" or "properties" in schema:
            return {
                key: self.sample(inner, key) for key, inner in schema.get("properties", {}).items()
            }
        if kind == "array":
            # One object on a page, and elsewhere so many that 1 is the place of one.
            return [self.sample(schema.get("items", {}))] * (1 if name == "data" else 2)
        plain = {"string": TEXT, "integer": 1, "number": 1.0, "boolean": False, "null": None}
        return plain[kind] if isinstance(kind, str) else None
