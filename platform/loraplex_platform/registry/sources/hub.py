"""A repository of the Hugging Face hub, pinned to a commit; only its two adapter files are read.

Three requests of the hub's API, spoken here and not by its own client: that one follows redirects to any
host, sends whatever token it finds on the machine, and has no bound on the bytes that it writes.
Protocol: huggingface.co/docs/hub/api, `GET /api/models/{repo}/revision/{revision}?blobs=true` and
`GET /{repo}/resolve/{commit}/{file}`, which answers itself or redirects to where large files lie.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urljoin, urlsplit

import httpx
from loraplex_engine.artifact import ADAPTER_FILES

from loraplex_platform.registry.errors import AdapterRejectedError
from loraplex_platform.registry.sources.base import (
    PIECE_BYTES,
    Listing,
    OnBytes,
    SourceUnavailableError,
    changed_meanwhile,
    check_names,
    check_sizes,
)
from loraplex_platform.registry.sources.rules import HubName

MAX_REDIRECTS: Final = 4
_MAX_INFO_BYTES: Final = 4 << 20
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_TIMEOUT: Final = httpx.Timeout(30.0, connect=10.0)


class HubSource:
    """See the module's header.

    Args:
        name: the repository.
        hub_url: of the hub, https unless it is this machine's.
        hosts: to which, beside the hub's own, downloads may be redirected; subdomains too.
        token: of the operator, sent to the hub's own host and nowhere else.
    """

    def __init__(
        self, name: HubName, *, hub_url: str, hosts: Sequence[str], token: str | None
    ) -> None:
        self._name = name
        self._hub_url = hub_url.rstrip("/")
        self._hosts = tuple(hosts)
        self._token = token
        self._sha256s: dict[str, str] = {}

    def look(self, max_model_bytes: int) -> Listing:
        """As `Source.look`; the revision becomes a commit here."""
        repo, folder = self._name.repo, self._name.folder
        where = f"hf://{repo}"
        with self._client() as client:
            path = f"/api/models/{repo}/revision/{quote(self._name.revision, safe='')}?blobs=true"
            info = self._info(client, path)
        commit = info.get("sha")
        siblings = info.get("siblings")
        if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
            raise SourceUnavailableError("source: the hub names no commit.", retry_after_s=60)
        prefix = f"{folder}/" if folder else ""
        entries: dict[str, dict[str, Any]] = {}
        for entry in siblings if isinstance(siblings, list) else []:
            file_name = str(entry.get("rfilename", ""))
            name = file_name.removeprefix(prefix)
            if file_name.startswith(prefix) and "/" not in name:
                entries[name] = entry
        check_names(set(entries), f"{where}/{folder}" if folder else where)
        sizes = {}
        for name in ADAPTER_FILES:
            entry = entries[name]
            large = entry.get("lfs") or {}
            size = large.get("size", entry.get("size"))
            if not isinstance(size, int) or size < 0:
                raise SourceUnavailableError(
                    f"source: the hub gives no size of {name}.", retry_after_s=60
                )
            sizes[name] = size
            if isinstance(large.get("sha256"), str):
                self._sha256s[name] = large["sha256"]
        check_sizes(sizes, max_model_bytes)
        resolved = f"{where}@{commit}" + (f"/{folder}" if folder else "")
        return Listing(resolved, sizes)

    def read(self, listing: Listing, into: Path, on_bytes: OnBytes) -> None:
        """As `Source.read`; a large file has the sha256 that the hub has listed, or is refused."""
        commit = listing.resolved.partition("@")[2].partition("/")[0]
        prefix = f"{self._name.folder}/" if self._name.folder else ""
        with self._client() as client:
            for name, size_bytes in listing.sizes.items():
                url = f"{self._hub_url}/{self._name.repo}/resolve/{commit}/{quote(prefix + name)}"
                digest = hashlib.sha256()
                left = size_bytes
                try:
                    with self._open(client, url) as answer, (into / name).open("xb") as target:
                        self._check(answer)
                        for piece in answer.iter_bytes(PIECE_BYTES):
                            left -= len(piece)
                            if left < 0:
                                raise changed_meanwhile(name)
                            target.write(piece)
                            digest.update(piece)
                            on_bytes(len(piece))
                except httpx.HTTPError as error:
                    raise self._away(error) from error
                if left:
                    raise SourceUnavailableError(
                        f"source: {name} ended {left} bytes early.", retry_after_s=5
                    )
                if self._sha256s.get(name, digest.hexdigest()) != digest.hexdigest():
                    raise changed_meanwhile(name)

    def _client(self) -> httpx.Client:
        # trust_env off: no proxy and no .netrc of the environment; redirects are looked at one by one.
        return httpx.Client(timeout=_TIMEOUT, trust_env=False, follow_redirects=False)

    def _info(self, client: httpx.Client, path: str) -> dict[str, Any]:
        body = bytearray()
        try:
            with self._open(client, self._hub_url + path) as answer:
                self._check(answer)
                for piece in answer.iter_bytes(PIECE_BYTES):
                    body += piece
                    if len(body) > _MAX_INFO_BYTES:
                        raise AdapterRejectedError(
                            "source", "the repository has too many files.", "Name a smaller one."
                        )
            info = httpx.Response(200, content=bytes(body)).json()
        except httpx.HTTPError as error:
            raise self._away(error) from error
        except ValueError:
            info = None
        if not isinstance(info, dict):
            raise SourceUnavailableError(
                "source: what answers there is no hub of Hugging Face's kind.", retry_after_s=60
            )
        return info

    def _open(self, client: httpx.Client, url: str) -> _Answer:
        return _Answer(self, client, url)

    def follow(self, url: str, location: str) -> str:
        """Where a redirect leads, if it may.

        Raises:
            AdapterRejectedError: to a host that is not the hub's.
        """
        target = urljoin(url, location)
        parts, hub = urlsplit(target), urlsplit(self._hub_url)
        if (parts.scheme, parts.netloc) == (hub.scheme, hub.netloc):
            return target
        host = parts.hostname or ""
        is_known = any(host == known or host.endswith(f".{known}") for known in self._hosts)
        if parts.scheme != "https" or parts.port not in (None, 443) or not is_known:
            raise AdapterRejectedError(
                "source",
                f"the hub redirects to {host[:100] or 'nowhere'}, which is not among its hosts.",
                "The operator allows hosts with LORAPLEX_IMPORT_HUB_HOSTS.",
            )
        return target

    def headers_for(self, url: str) -> dict[str, str]:
        """The token for the hub itself, for no other host."""
        parts, hub = urlsplit(url), urlsplit(self._hub_url)
        is_hub = (parts.scheme, parts.netloc) == (hub.scheme, hub.netloc)
        headers = {"accept-encoding": "identity"}
        if self._token is not None and is_hub:
            headers["authorization"] = f"Bearer {self._token}"
        return headers

    def _check(self, answer: httpx.Response) -> None:
        if answer.status_code in (401, 403, 404):
            raise AdapterRejectedError(
                "source",
                f"the hub has no {self._name.repo} at revision {self._name.revision} that this server may read.",
                "Check the name and the revision; a private repository needs LORAPLEX_IMPORT_HUB_TOKEN.",
            )
        if answer.status_code != 200:
            raise SourceUnavailableError(
                f"source: the hub answers {answer.status_code}.", retry_after_s=30
            )

    def _away(self, error: httpx.HTTPError) -> SourceUnavailableError:
        return SourceUnavailableError(
            f"source: {urlsplit(self._hub_url).netloc} cannot be reached ({type(error).__name__}).",
            retry_after_s=10,
        )


class _Answer:
    """`with` it: the answer at the end of the redirects, its body not read yet."""

    def __init__(self, source: HubSource, client: httpx.Client, url: str) -> None:
        self._source, self._client, self._url = source, client, url
        self._response: httpx.Response | None = None

    def __enter__(self) -> httpx.Response:
        url = self._url
        for _ in range(MAX_REDIRECTS + 1):
            request = self._client.build_request("GET", url, headers=self._source.headers_for(url))
            response = self._client.send(request, stream=True)
            if not response.has_redirect_location:
                self._response = response
                return response
            location = response.headers["location"]
            response.close()
            url = self._source.follow(url, location)
        raise SourceUnavailableError("source: the hub redirects in circles.", retry_after_s=60)

    def __exit__(self, *_: object) -> None:
        if self._response is not None:
            self._response.close()
