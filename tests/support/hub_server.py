"""The few answers of the Hugging Face hub that imports ask for, over real HTTP on this machine.

with HubServer() as hub:
    hub.add("acme/capitals", {"adapter_config.json": b"{}"}, revision="v1")
    ... LORAPLEX_IMPORT_HUB_URL = hub.url
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import unquote, urlsplit

LARGE = ".safetensors"


@dataclass
class _Repo:
    commit: str
    files: dict[str, bytes]
    revisions: set[str]


@dataclass
class HubServer:
    """See the module's header."""

    # Path -> where its download is redirected to; the hub sends large files to other hosts.
    redirects: dict[str, str] = field(default_factory=dict)
    # Bytes of a download before the connection is cut, once.
    cut_after: int | None = None
    status: int | None = None  # of every answer, instead of the true one
    asked: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    go_on: threading.Event = field(default_factory=threading.Event)
    stops_after: int | None = None  # bytes of a download before it waits for `go_on`
    is_stopped: threading.Event = field(default_factory=threading.Event)
    _repos: dict[str, _Repo] = field(default_factory=dict)

    def __enter__(self) -> Self:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.asked.append((self.path, {k.lower(): v for k, v in self.headers.items()}))
                hub.answer(self)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.go_on.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def add(self, name: str, files: Mapping[str, bytes], *, revision: str = "main") -> str:
        """A repository at one commit; the commit."""
        commit = hashlib.sha1(repr((name, sorted(files.items()))).encode()).hexdigest()  # as git
        self._repos[name] = _Repo(commit, dict(files), {revision, commit})
        return commit

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = unquote(urlsplit(request.path).path)
        if self.status is not None:
            self._send(request, self.status, b"no")
            return
        if path in self.redirects:
            request.send_response(302)
            request.send_header("location", self.redirects[path])
            request.send_header("content-length", "0")
            request.end_headers()
            return
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"] and len(parts) == 6:
            found = self._repos.get("/".join(parts[2:4]))
            if found is not None and parts[5] in found.revisions:
                self._send(request, 200, json.dumps(self._info(found)).encode())
                return
        elif len(parts) >= 5 and parts[2] == "resolve":
            found = self._repos.get("/".join(parts[:2]))
            data = None if found is None else found.files.get("/".join(parts[4:]))
            if found is not None and data is not None and parts[3] in found.revisions:
                self._send(request, 200, data)
                return
        self._send(request, 404, b"Repository not found")

    def _info(self, repo: _Repo) -> dict[str, Any]:
        siblings = []
        for name, data in repo.files.items():
            entry: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": "0" * 40}
            if name.endswith(LARGE):
                digest = hashlib.sha256(data).hexdigest()
                entry["lfs"] = {"sha256": digest, "size": len(data), "pointerSize": 134}
            siblings.append(entry)
        return {"id": "x", "sha": repo.commit, "siblings": siblings}

    def _send(self, request: BaseHTTPRequestHandler, status: int, data: bytes) -> None:
        request.send_response(status)
        request.send_header("content-length", str(len(data)))
        request.end_headers()
        is_download = "/resolve/" in request.path and request.path.endswith(LARGE)
        if is_download and self.cut_after is not None:
            request.wfile.write(data[: self.cut_after])
            self.cut_after = None
            request.wfile.flush()
            request.connection.close()
            request.close_connection = True
            return
        if is_download and self.stops_after is not None:
            request.wfile.write(data[: self.stops_after])
            request.wfile.flush()
            data = data[self.stops_after :]
            self.is_stopped.set()
            self.go_on.wait(60)
        request.wfile.write(data)
