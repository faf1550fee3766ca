"""A typed client of the control API: everything the console knows comes through here.

No SQL, no engine: permissions are tested once, in the API. Answers keep the API's own field names, so
that its OpenAPI page is the documentation of these types.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO, Generic, Literal, Self, TypedDict, TypeVar, cast

import httpx

from loraplex_admin.resources import PAGE_SIZE, Collection, Row, segment

TIMEOUT_S = 30.0
# An upload is validated and probed before it is answered.
UPLOAD_TIMEOUT_S = 300.0
# The gateway writes at least a comment every ten seconds, once it has begun to answer.
STREAM_TIMEOUT_S = 60.0
# Of the usage report; a chart of more says nothing, and the CSV is always whole.
_MAX_USAGE_PAGES = 20
SESSION_COOKIE = "loraplex_session"

ItemT = TypeVar("ItemT")


class ApiError(Exception):
    """The API refused; its message says what is wrong and what to do."""

    def __init__(self, message: str, *, status: int, code: str | None, param: str | None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param

    @property
    def is_stale(self) -> bool:
        """Somebody else has changed it since it was read."""
        return self.code == "version_conflict"


class ApiUnreachableError(Exception):
    """The control API does not answer."""


class Page(TypedDict, Generic[ItemT]):
    """One page of a list; `after=last_id` gets the next."""

    data: list[ItemT]
    first_id: str | None
    last_id: str | None
    has_more: bool


class User(TypedDict):
    """Who is logged in."""

    id: str
    email: str
    role: Literal["admin", "viewer"] | None


class Membership(TypedDict):
    """What somebody is in a tenant, and what that allows."""

    tenant_id: str
    role: str
    actions: list[str]


class Session(TypedDict):
    """A login, and what it allows."""

    user: User
    memberships: list[Membership]
    actions: list[str]
    expires_at: int


class Overview(TypedDict):
    """The fleet at a glance."""

    requests_per_s: float
    tokens_per_s: float
    running: int
    waiting: int
    kv_usage: float
    resident_adapters: int
    tenants: int
    keys: int
    adapters: int
    deployments: int
    cost_today_usd: str
    recent_requests: int
    recent_failed: int


class Tenant(TypedDict):
    """A customer."""

    id: str
    slug: str
    name: str
    status: str
    billing_tz: str
    replays_answers: bool
    version: int
    created_at: int


class Check(TypedDict):
    """One check of an upload."""

    name: str
    ok: bool
    detail: str


class ProbeSample(TypedDict):
    """One prompt, answered by base and adapter."""

    prompt: str
    base: str
    adapter: str


class Probe(TypedDict):
    """What the adapter changes."""

    samples: list[ProbeSample]
    changed: int
    max_logprob_difference: float


class Report(TypedDict):
    """What was checked and seen at the upload."""

    checks: list[Check]
    matched_modules: int
    total_modules: int
    parameters: int
    norms: dict[str, float]
    probe: Probe | None


class AdapterVersion(TypedDict):
    """An immutable version."""

    id: str
    adapter_id: str
    version: int
    digest: str
    status: str
    size_bytes: int
    rank: int
    target_modules: list[str]
    created_at: int
    report: Report


class Adapter(TypedDict):
    """A named line of versions, newest first."""

    id: str
    tenant_id: str
    name: str
    created_at: int
    versions: list[AdapterVersion]


class UploadedAdapter(TypedDict):
    """The answer to an upload."""

    id: str
    tenant_id: str
    name: str
    version: AdapterVersion


class Revision(TypedDict):
    """What answers under a deployment's name."""

    id: str
    number: int
    version_id: str | None
    adapter_id: str | None
    adapter_name: str | None
    digest: str | None
    created_at: int


class Deployment(TypedDict):
    """A public model id of a tenant."""

    id: str
    tenant_id: str
    name: str
    base_model: str
    revision: Revision
    created_at: int
    updated_at: int


class UsageRow(TypedDict, total=False):
    """Tokens and dollars of a bucket."""

    start_time: int
    end_time: int
    tenant_id: str
    tenant: str
    key_id: str
    model: str
    adapter_version_id: str
    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    absorbed_tokens: int
    adapter_seconds: int
    cost_usd: str


class RequestRow(TypedDict):
    """Metadata of one request."""

    id: str
    tenant_id: str
    kind: Literal["user", "probe"]
    endpoint: str
    model: str
    state: Literal["reserved", "settled", "voided"]
    finish_reason: str | None
    http_status: int | None
    error_code: str | None
    prompt_tokens: int | None
    cached_tokens: int | None
    completion_tokens: int | None
    ttft_ms: int | None
    e2e_ms: int | None
    created_at: int


class InvariantCheck(TypedDict):
    """One rule of the books."""

    name: str
    title: str
    ok: bool
    detail: str
    offenders: list[str]


class Invariants(TypedDict):
    """Whether the books add up."""

    ok: bool
    checked_at: int
    identity: dict[str, int]
    checks: list[InvariantCheck]


class ChatStream:
    """One answer as it comes: iterate over its pieces; `close` from any thread ends it.

    Attributes:
        request_id: `req_...`, once the answer has begun.
        usage: `prompt_tokens` and `completion_tokens`, once it has ended well.

    Raises (while iterating):
        ApiError: a refusal, an error frame, or an end without `[DONE]`: the answer is incomplete.
        ApiUnreachableError: the connection failed. After `close`, iterating just ends.
    """

    def __init__(self, http: httpx.Client, path: str, body: dict[str, Any]) -> None:
        self._http = http
        self._path = path
        self._body = body
        self._lock = threading.Lock()
        self._is_closed = False
        self._socket: socket.socket | None = None
        self.request_id: str | None = None
        self.usage: dict[str, Any] | None = None

    def close(self) -> None:
        """End the request; the engine stops, and what nobody reads is not billed."""
        with self._lock:
            self._is_closed = True
            _shut(self._socket)

    def __iter__(self) -> Iterator[str]:
        try:
            with self._http.stream(
                "POST", self._path, json=self._body, timeout=STREAM_TIMEOUT_S
            ) as answer:
                self._hold(answer)
                if answer.is_error:
                    answer.read()
                    _raise_refusal(answer)
                yield from self._contents(answer.iter_lines())
        except (ApiError, httpx.TransportError) as error:
            if self._is_closed:
                return
            if isinstance(error, ApiError):
                raise
            raise ApiUnreachableError(str(error)) from error
        finally:
            with self._lock:
                self._socket = None

    def _contents(self, lines: Iterator[str]) -> Iterator[str]:
        """Text pieces of a chat stream.

        Raises:
            ApiError: an error frame, or an end without `[DONE]`: the answer is incomplete.
        """
        for line in lines:
            if not line.startswith("data: "):
                continue
            data = line.removeprefix("data: ")
            if data == "[DONE]":
                return
            frame = json.loads(data)
            if "error" in frame:
                error = frame["error"]
                raise ApiError(error["message"], status=502, code=error.get("code"), param=None)
            if "id" in frame:
                self.request_id = f"req_{str(frame['id']).rpartition('-')[2]}"
            self.usage = frame.get("usage") or self.usage
            for choice in frame["choices"]:
                if piece := choice["delta"].get("content"):
                    yield piece
        raise ApiError("The answer broke off.", status=502, code="incomplete_stream", param=None)

    def _hold(self, answer: httpx.Response) -> None:
        # Closing a response while another thread reads it is not safe; ending its connection is.
        stream = answer.extensions.get("network_stream")
        with self._lock:
            self._socket = None if stream is None else stream.get_extra_info("socket")
            if self._is_closed:
                _shut(self._socket)


def _shut(connection: socket.socket | None) -> None:
    if connection is None:
        return
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # it has ended by itself


class Api:
    """Calls `/admin/v1` as the person whose session cookie this is.

    Args:
        control_url: where the control API answers.
        session_token: the value of the browser's cookie; empty: nobody.
        transport: connections to share; its owner closes it.
    """

    def __init__(
        self, control_url: str, session_token: str, *, transport: httpx.BaseTransport | None = None
    ) -> None:
        self._is_shared = transport is not None
        # trust_env off: a proxy of the environment must not see sessions and secrets.
        self._http = httpx.Client(
            base_url=f"{control_url.rstrip('/')}/admin/v1",
            cookies={SESSION_COOKIE: session_token},
            timeout=TIMEOUT_S,
            transport=transport,
            trust_env=False,
        )

    def close(self) -> None:
        """Close the connections, unless they are shared."""
        if not self._is_shared:
            self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------- session

    def session(self) -> Session | None:
        """Who is logged in; None when the session is unknown, expired or ended."""
        try:
            return cast(Session, self.read("/sessions/current"))
        except ApiError as error:
            if error.status == httpx.codes.UNAUTHORIZED:
                return None
            raise

    def log_out(self) -> None:
        """End this session everywhere it is open."""
        self._call("DELETE", "/sessions/current")

    # ------------------------------------------------------------------------------ overview

    def overview(self) -> Overview:
        """Figures of the whole fleet, now."""
        return cast(Overview, self._get("/overview"))

    def fleet(self) -> dict[str, Any]:
        """Replicas with their statistics, and gateways."""
        return self._get("/fleet")

    def invariants(self, *, run: Literal["now", "last"] = "now") -> Invariants:
        """Run the checks of the books, which takes its time where they are long, or what the last run found.

        Raises:
            ApiError: 404: `last`, and none was kept yet.
        """
        return cast(Invariants, self.read("/invariants", run=run))

    # ---------------------------------------------------------------------- tenants and keys

    def tenants(
        self, *, after: str | None = None, search: str | None = None, limit: int = PAGE_SIZE
    ) -> Page[Tenant]:
        """One page of tenants."""
        return cast(Page[Tenant], self.page("/tenants", after=after, search=search, limit=limit))

    def tenant_called(self, slug: str) -> Tenant | None:
        """The one with exactly this slug; None: there is none, or it is none of the caller's."""
        found = cast(Page[Tenant], self.page("/tenants", slug=slug, limit=1))["data"]
        return found[0] if found else None

    def tenant(self, tenant_id: str) -> Tenant:
        """One tenant by id."""
        return cast(Tenant, self.read(f"/tenants/{segment(tenant_id)}"))

    def create_tenant(self, body: Row, *, once: str | None = None) -> Tenant:
        """A new tenant."""
        return cast(Tenant, self.send("POST", "/tenants", body, once=once))

    @property
    def all_tenants(self) -> Collection:
        """What can be done to tenants themselves."""
        return Collection(self, "/tenants")

    def of_tenant(self, tenant_id: str, name: str) -> Collection:
        """A list that belongs to a tenant: `keys`, `members`, `invitations`, `webhooks` and so on."""
        return Collection(self, f"/tenants/{segment(tenant_id)}/{name}")

    def of_platform(self, name: str) -> Collection:
        """A list of the operator, or of all whom the caller may see: `limits`, `price-books`, `users`."""
        return Collection(self, f"/{name}")

    def owned(self, tenant: Tenant | None, name: str) -> Collection:
        """A list of the tenant; None: the platform's own of the same kind."""
        return self.of_platform(name) if tenant is None else self.of_tenant(tenant["id"], name)

    # ------------------------------------------------------------- adapters and deployments

    def adapters(
        self, tenant_id: str, *, after: str | None = None, search: str | None = None
    ) -> Page[Adapter]:
        """One page of a tenant's adapters with their versions."""
        path = f"/tenants/{tenant_id}/adapters"
        return cast(Page[Adapter], self.page(path, after=after, search=search))

    def upload_adapter(
        self, tenant_id: str, name: str, config: BinaryIO, tensors: BinaryIO
    ) -> UploadedAdapter:
        """Upload, validate and probe; returns when the version is ready to serve."""
        answer = self._call(
            "POST",
            f"/tenants/{tenant_id}/adapters",
            data={"name": name},
            files={
                "adapter_config": ("adapter_config.json", config, "application/json"),
                "adapter_model": (
                    "adapter_model.safetensors",
                    tensors,
                    "application/octet-stream",
                ),
            },
            timeout=UPLOAD_TIMEOUT_S,
        )
        return cast(UploadedAdapter, _json(answer))

    def deployments(self, tenant_id: str, *, after: str | None = None) -> Page[Deployment]:
        """One page of a tenant's deployments."""
        path = f"/tenants/{tenant_id}/deployments"
        return cast(Page[Deployment], self.page(path, after=after))

    def deploy(self, tenant_id: str, name: str, version_id: str | None) -> Deployment:
        """Let `name` answer with a version from now on; None: with the base. What else it is set to stays."""
        tenant = self.tenant(tenant_id)
        return cast(Deployment, self.deploy_content(tenant, name, {"version_id": version_id}))

    def deploy_content(self, tenant: Tenant | None, name: str, content: Row) -> Row:
        """Let `name` answer with this; what is not named (engine build, system prompt, sampling) stays.

        Args:
            tenant: whose it is; None: the platform's own.
        """
        deployments = self.owned(tenant, "deployments")
        try:
            found = deployments.get(name)
        except ApiError as error:
            if error.status != httpx.codes.NOT_FOUND:
                raise
            return deployments.put(name, content)
        now = found["revision"]
        params = now["params"] | content.get("params", {})
        if "sampling" in now["params"] and "sampling" in params:
            params["sampling"] = now["params"]["sampling"] | params["sampling"]
        kept = {"engine_build_id": now["engine_build_id"]} | content | {"params": params}
        return deployments.put(name, kept, version=found["version"])

    def delete_deployment(self, tenant_id: str, name: str) -> None:
        """Take a name out of service; its history stays."""
        self._call("DELETE", f"/tenants/{tenant_id}/deployments/{segment(name)}")

    # --------------------------------------------------------------------- usage and requests

    def usage(
        self, *, start: int, end: int, bucket: str, group_by: list[str], tenant_id: str | None
    ) -> tuple[list[UsageRow], bool]:
        """Usage rows of [start, end), unix seconds, and whether there are more than were read."""
        query = self._usage_query(start, end, bucket, group_by, tenant_id)
        rows: list[UsageRow] = []
        for _ in range(_MAX_USAGE_PAGES):
            answer = self._get("/usage", query)
            rows += cast(list[UsageRow], answer["data"])
            if not answer["has_more"]:
                return rows, False
            query["page"] = answer["next_page"]
        return rows, True

    def usage_csv(
        self, *, start: int, end: int, bucket: str, group_by: list[str], tenant_id: str | None
    ) -> bytes:
        """The same rows as the API's own CSV, whose cells are safe in a spreadsheet."""
        query = self._usage_query(start, end, bucket, group_by, tenant_id) | {"format": "csv"}
        return self._call("GET", "/usage", params=query).content

    @staticmethod
    def _usage_query(
        start: int, end: int, bucket: str, group_by: list[str], tenant_id: str | None
    ) -> dict[str, Any]:
        query: dict[str, Any] = {
            "start_time": start,
            "end_time": end,
            "bucket_width": bucket,
            "group_by[]": group_by,
        }
        return query | ({"tenant_id": tenant_id} if tenant_id else {})

    def requests(
        self, *, tenant_id: str | None, after: str | None = None, **only: str | None
    ) -> Page[RequestRow]:
        """One page of the request log, newest first; metadata only. `only`: `revision_id` and the like."""
        found = self.page("/requests", after=after, limit=PAGE_SIZE, tenant_id=tenant_id, **only)
        return cast(Page[RequestRow], found)

    def explain(self, request_id: str) -> Row:
        """What became of a request, and which limits had a part in it."""
        return self.read(f"/explain/{segment(request_id)}")

    def effective_limits(self, key_id: str, deployment_id: str | None) -> list[Row]:
        """All limits that bind a key now, with what is left of each."""
        found = self.read("/limits/effective", key_id=key_id, deployment_id=deployment_id)
        return cast(list[Row], found["data"])

    # -------------------------------------------------------------------------- playground

    def chat(
        self,
        tenant_id: str,
        model: str,
        messages: list[dict[str, str]],
        *,
        max_tokens: int,
        temperature: float,
        revision_id: str | None = None,
    ) -> ChatStream:
        """An answer to iterate over; billed to the tenant like any request. `revision_id`: else what answers now."""
        body: Row = {
            "model": model,
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": temperature,
        } | ({} if revision_id is None else {"revision_id": revision_id})
        return ChatStream(self._http, f"/tenants/{tenant_id}/playground", body)

    # ------------------------------------------------------------------------------ plumbing

    def read(self, path: str, **query: str | None) -> Row:
        """GET what is there, with the `version` that its ETag names; of `query` what is None is not asked."""
        asked = {name: value for name, value in query.items() if value is not None}
        answer = self._call("GET", path, params=asked)
        found = _json(answer)
        tag = answer.headers.get("etag", "").strip('"')
        return {"version": int(tag)} | found if tag.isdecimal() else found

    def page(
        self, path: str, *, after: str | None = None, limit: int = PAGE_SIZE, **query: str | None
    ) -> Page[Row]:
        """GET one page of a list."""
        answer = self.read(path, after=after, limit=str(limit), **query)
        return cast(Page[Row], {"first_id": None, "last_id": None, "has_more": False} | answer)

    def send(
        self,
        method: Literal["POST", "PUT", "PATCH", "DELETE"],
        path: str,
        body: Row | None = None,
        *,
        version: int | None = None,
        once: str | None = None,
        query: Mapping[str, str | None] | None = None,
    ) -> Row:
        """Change something; the answer, empty where there is none.

        Args:
            version: which is meant, as If-Match; another one there is a 409 (`ApiError.is_stale`).
            once: an Idempotency-Key: the same call again gets the same answer and changes nothing.
        """
        headers = {} if version is None else {"if-match": f'"{version}"'}
        if once is not None:
            headers["idempotency-key"] = once
        asked = {name: value for name, value in (query or {}).items() if value is not None}
        answer = self._call(method, path, json=body, headers=headers, params=asked)
        return {} if answer.status_code == httpx.codes.NO_CONTENT else _json(answer)

    def download(self, path: str, **query: str | None) -> bytes:
        """GET a file."""
        asked = {name: value for name, value in query.items() if value is not None}
        return self._call("GET", path, params=asked).content

    def _get(self, path: str, query: dict[str, Any] | None = None) -> Row:
        return _json(self._call("GET", path, params=query))

    def _call(self, method: str, path: str, **options: Any) -> httpx.Response:  # noqa: ANN401 - httpx's own options
        try:
            answer = self._http.request(method, path, **options)
        except httpx.TransportError as error:
            raise ApiUnreachableError(str(error)) from error
        if answer.is_error:
            _raise_refusal(answer)
        return answer


def _json(answer: httpx.Response) -> Row:
    try:
        return cast(Row, answer.json())
    except ValueError as error:
        raise ApiError(
            "What answers is not the control API; check LORAPLEX_CONTROL_URL.",
            status=answer.status_code,
            code=None,
            param=None,
        ) from error


def _raise_refusal(answer: httpx.Response) -> None:
    try:
        error = answer.json()["error"]
        message, code, param = error["message"], error["code"], error["param"]
    except (ValueError, KeyError, TypeError):
        message, code, param = f"The control API answered {answer.status_code}.", None, None
    raise ApiError(message, status=answer.status_code, code=code, param=param)
