"""A synchronous client of the control API, for the command line, the demo and `loraplex verify`.

Answers stay the dicts of the API: whoever needs one field reads it. A refusal is an `AdminApiError` with
the API's own message, which already says what to do.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import httpx

PAGE_SIZE = 100
TIMEOUT_S = 30.0
# An upload is validated and probed before it is answered.
UPLOAD_TIMEOUT_S = 300.0
# A quota is set once what its period has used is counted: of millions of requests, half a minute or so.
COUNTING_TIMEOUT_S = 300.0
CHAT_TIMEOUT_S = 120.0  # without a word; a stream that says nothing has its pings

Json = dict[str, Any]
Progress = Callable[[int, int], None]  # bytes sent, bytes in all


class AdminApiError(Exception):
    """The control API refused, or could not be reached (`status` is None then)."""

    def __init__(
        self, message: str, *, status: int | None, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


class AdminClient:
    """Calls `/admin/v1` with an admin key."""

    def __init__(self, control_url: str, admin_key: str) -> None:
        self._http = httpx.Client(
            base_url=f"{control_url}/admin/v1",
            headers={"Authorization": f"Bearer {admin_key}"},
            timeout=TIMEOUT_S,
        )
        self.control_url = control_url

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._http.close()

    # ------------------------------------------------------------------------ tenants and keys

    def find_tenant(self, slug_or_id: str) -> Json | None:
        """The tenant with this slug or id, or None."""
        for tenant in self._pages("/tenants"):
            if slug_or_id in {tenant["slug"], tenant["id"]}:
                return tenant
        return None

    def tenant(self, slug_or_id: str) -> Json:
        """As `find_tenant`.

        Raises:
            AdminApiError: there is none.
        """
        found = self.find_tenant(slug_or_id)
        if found is None:
            raise AdminApiError(f"there is no tenant {slug_or_id}", status=404, code="not_found")
        return found

    def create_tenant(self, slug: str, name: str) -> Json:
        """A new tenant."""
        return self._json("POST", "/tenants", json={"slug": slug, "name": name})

    def keys(self, tenant_id: str) -> list[Json]:
        """All keys of a tenant, without their secrets."""
        return list(self._pages(f"/tenants/{tenant_id}/keys"))

    def create_key(self, tenant_id: str, name: str) -> Json:
        """A new key; its secret is in this answer and nowhere else."""
        return self._json("POST", f"/tenants/{tenant_id}/keys", json={"name": name})

    # ------------------------------------------------------------------------ adapters

    def adapters(self, tenant_id: str) -> list[Json]:
        """All adapters of a tenant with their versions."""
        return list(self._pages(f"/tenants/{tenant_id}/adapters"))

    def upload_adapter(
        self,
        tenant_id: str,
        name: str,
        folder: Path,
        on_progress: Progress | None = None,
        *,
        is_probed: bool = True,
    ) -> Json:
        """Upload a PEFT folder; the same content again gives the same version.

        Args:
            on_progress: told after each piece of the tensor file.
            is_probed: False: checked, but not asked anything; for uploads by the hundred.

        Raises:
            AdminApiError: refused; `param` is the field, the message says what is wrong with it.
            OSError: a file could not be read.
        """
        with (
            (folder / "adapter_config.json").open("rb") as config,
            _CountingFile(folder / "adapter_model.safetensors", on_progress) as model,
        ):
            return self._json(
                "POST",
                f"/tenants/{tenant_id}/adapters",
                # A control API that knows no probe=false refuses the field, and probes without it.
                data={"name": name} | ({} if is_probed else {"probe": "false"}),
                files={
                    "adapter_config": ("adapter_config.json", config, "application/json"),
                    "adapter_model": (
                        "adapter_model.safetensors",
                        model,
                        "application/octet-stream",
                    ),
                },
                timeout=UPLOAD_TIMEOUT_S,
            )

    # An upload in pieces; `resumable_upload.py` puts them together.

    def begin_upload(self, tenant_id: str, plan: Json) -> Json:
        """Say what is to come, as `POST /adapter-uploads` takes it."""
        return self._json("POST", f"/tenants/{tenant_id}/adapter-uploads", json=plan)

    def upload_offset(self, tenant_id: str, upload_id: str, file_name: str) -> int:
        """Bytes of a file that are there."""
        path = f"/tenants/{tenant_id}/adapter-uploads/{upload_id}/files/{file_name}"
        return int(self._call("GET", path).headers["upload-offset"])

    def append_bytes(
        self, tenant_id: str, upload_id: str, file_name: str, offset: int, data: Iterator[bytes]
    ) -> int:
        """Send a file's next bytes; how many are there then."""
        path = f"/tenants/{tenant_id}/adapter-uploads/{upload_id}/files/{file_name}"
        headers = {
            "content-type": "application/offset+octet-stream",
            "upload-offset": str(offset),
        }
        answer = self._call("PATCH", path, content=data, headers=headers, timeout=UPLOAD_TIMEOUT_S)
        return int(answer.headers["upload-offset"])

    def complete_upload(self, tenant_id: str, upload_id: str) -> Json:
        """Have it checked; the adapter with the version that it is."""
        path = f"/tenants/{tenant_id}/adapter-uploads/{upload_id}/complete"
        return self._json("POST", path, timeout=UPLOAD_TIMEOUT_S)

    def begin_import(self, tenant_id: str, name: str, source: str, *, is_probed: bool) -> Json:
        """Have the server fetch an adapter; the job."""
        body = {"name": name, "source": source, "probe": is_probed}
        return self._json("POST", f"/tenants/{tenant_id}/adapters/import", json=body)

    def get_import(self, tenant_id: str, import_id: str) -> Json:
        """How far it is."""
        return self._json("GET", f"/tenants/{tenant_id}/adapter-imports/{import_id}")

    def imports(self, tenant_id: str) -> list[Json]:
        """All of a tenant's, newest first."""
        return list(self._pages(f"/tenants/{tenant_id}/adapter-imports"))

    def deployments(self, tenant_id: str) -> list[Json]:
        """All deployments of a tenant."""
        return list(self._pages(f"/tenants/{tenant_id}/deployments"))

    def deploy(self, tenant_id: str, name: str, version_id: str | None) -> Json:
        """Let the model `name` answer with this version (None: the base). Whatever else its revision says
        (system prompt, sampling, engine build, price book) stays.
        """
        path = f"/tenants/{tenant_id}/deployments/{name}"
        body: Json = {"version_id": version_id}
        etag = None
        try:
            current, etag = self.read(path)
        except AdminApiError as error:
            if error.status != 404:
                raise
        else:
            body |= {field: current["revision"][field] for field in ("engine_build_id", "params")}
        return self.change("PUT", path, body, etag)

    # ------------------------------------------------------------------------ the rest

    def find_user(self, email: str) -> Json | None:
        """The user with this address, or None."""
        for user in self._pages("/users"):
            if user["email"].lower() == email.lower():
                return user
        return None

    def create_user(self, email: str, password: str, role: str) -> Json:
        """A console user."""
        return self._json(
            "POST", "/users", json={"email": email, "password": password, "role": role}
        )

    def usage(self, start_time: int, end_time: int, group_by: list[str]) -> list[Json]:
        """Usage in one bucket per day and group."""
        params: Json = {
            "start_time": start_time,
            "end_time": end_time,
            "bucket_width": "1d",
            "group_by[]": group_by,
            "limit": PAGE_SIZE,
        }
        return cast(list[Json], self._json("GET", "/usage", params=params)["data"])

    def fleet(self) -> Json:
        """Replicas with their statistics, and gateways."""
        return self._json("GET", "/fleet")

    def invariants(self) -> Json:
        """The identity of generated and billed tokens, and the other checks."""
        return self._json("GET", "/invariants")

    def audit(self, **filters: Any) -> Iterator[Json]:  # noqa: ANN401 - the API's query parameters
        """Audit entries, newest first; filters as `GET /audit` takes them, None: not given."""
        return self._pages("/audit", {k: v for k, v in filters.items() if v is not None})

    def alerts(self, **filters: Any) -> Iterator[Json]:  # noqa: ANN401 - the API's query parameters
        """Alerts, newest first; filters as `GET /alerts` takes them, None: not given."""
        return self._pages("/alerts", {k: v for k, v in filters.items() if v is not None})

    def audit_chains(self) -> list[Json]:
        """The newest row of every chain of the audit log."""
        return list(self._pages("/audit/chains"))

    def audit_link(self, chain: str, seq: int) -> Json:
        """The hash of one row of a chain."""
        return self._json("GET", f"/audit/chains/{chain}/{seq}")

    def retention(self) -> list[Json]:
        """How long what is kept, and what is due."""
        return cast(list[Json], self._json("GET", "/retention")["data"])

    def set_retention(self, name: str, keep_days: int | None) -> Json:
        """Keep something for so many days; None: for ever."""
        return self._json("PUT", f"/retention/{name}", json={"keep_days": keep_days})

    def apply_retention(self) -> Json:
        """Delete what is due now."""
        return self._json("POST", "/retention/runs", timeout=UPLOAD_TIMEOUT_S)

    # ------------------------------------------------------------------------ limits

    def limits(self, tenant_id: str | None = None) -> Iterator[Json]:
        """Limits and what is used of them; of all tenants and the platform if none is named."""
        return self._pages("/limits", {} if tenant_id is None else {"tenant_id": tenant_id})

    def effective_limits(self, key_id: str, deployment_id: str | None = None) -> list[Json]:
        """All limits that bind a key, and with `deployment_id` its requests for that model."""
        params = {"key_id": key_id, "deployment_id": deployment_id}
        wanted = {name: value for name, value in params.items() if value is not None}
        return cast(list[Json], self._json("GET", "/limits/effective", params=wanted)["data"])

    def create_limit(self, body: Json) -> Json:
        """A new limit, as `POST /limits` takes it. Counting what was used may take a while."""
        return self._json("POST", "/limits", json=body, timeout=COUNTING_TIMEOUT_S)

    def update_limit(self, limit_id: str, changes: Json) -> Json:
        """Change a limit; what is not named stays."""
        return self._json("PATCH", f"/limits/{limit_id}", json=changes)

    def delete_limit(self, limit_id: str) -> None:
        """Remove a limit."""
        self._call("DELETE", f"/limits/{limit_id}")

    def explain(self, request_id: str) -> Json:
        """What became of a request, in words."""
        return self._json("GET", f"/explain/{request_id}")

    def delete_tenant(self, tenant_id: str, slug: str) -> Json:
        """Delete a tenant for good; what went and what was kept."""
        return self._json("DELETE", f"/tenants/{tenant_id}", params={"confirm": slug})

    # ------------------------------------------------------------------------ webhooks
    # Of a tenant, or (None) the operator's own.

    def create_webhook(self, tenant_id: str | None, body: Json) -> Json:
        """A new one; its secret is in this answer and nowhere else."""
        return self._json("POST", _webhooks_path(tenant_id), json=body)

    def webhooks(self, tenant_id: str | None, **filters: str) -> list[Json]:
        """All of them, or those with `search` in the address or in what it is for."""
        return list(self._pages(_webhooks_path(tenant_id), filters))

    def change_webhook(self, tenant_id: str | None, webhook_id: str, changes: Json) -> Json:
        """Change what is named in `changes`."""
        return self._json("PATCH", f"{_webhooks_path(tenant_id)}/{webhook_id}", json=changes)

    def delete_webhook(self, tenant_id: str | None, webhook_id: str) -> None:
        """Delete it with its deliveries."""
        self._call("DELETE", f"{_webhooks_path(tenant_id)}/{webhook_id}")

    def webhook_deliveries(self, tenant_id: str | None, webhook_id: str) -> Iterator[Json]:
        """What it was told, newest first."""
        return self._pages(f"{_webhooks_path(tenant_id)}/{webhook_id}/deliveries")

    def act_on_webhook(
        self, tenant_id: str | None, webhook_id: str, action: str, body: Json | None = None
    ) -> Json:
        """`test`, `rotate`, or `deliveries/{id}/replay`."""
        return self._json("POST", f"{_webhooks_path(tenant_id)}/{webhook_id}/{action}", json=body)

    # ------------------------------------------------------------------------ prices and invoices

    def price_books(self, **filters: str) -> list[Json]:
        """All price books, or those with `search` in their name, without their prices."""
        return list(self._pages("/price-books", filters))

    def price_book(self, book_id: str) -> Json:
        """One with its prices."""
        return self._json("GET", f"/price-books/{book_id}")

    def create_price_book(self, body: Json) -> Json:
        """A draft."""
        return self._json("POST", "/price-books", json=body)

    def change_price_book(self, book_id: str, changes: Json) -> Json:
        """A draft as it is to be."""
        return self._json("PATCH", f"/price-books/{book_id}", json=changes)

    def delete_price_book(self, book_id: str) -> None:
        """A draft is gone."""
        self._call("DELETE", f"/price-books/{book_id}")

    def price_book_action(self, book_id: str, action: str, body: Json) -> Json:
        """`publish`, `retire`, `preview` or `quote`."""
        return self._json("POST", f"/price-books/{book_id}/{action}", json=body)

    def add_adjustment(self, tenant_id: str, kind: str, amount_usd: str, reason: str) -> Json:
        """A credit or a debit."""
        body = {"kind": kind, "amount_usd": amount_usd, "reason": reason}
        return self._json("POST", f"/tenants/{tenant_id}/adjustments", json=body)

    def reverse(self, tenant_id: str, entry_id: str, reason: str) -> Json:
        """Take a request's charge, a credit or a debit back."""
        body = {"entry_id": entry_id, "reason": reason}
        return self._json("POST", f"/tenants/{tenant_id}/reversals", json=body)

    def adjustments(self, tenant_id: str) -> list[Json]:
        """Credits, debits and reversals."""
        return list(self._pages(f"/tenants/{tenant_id}/adjustments"))

    def balance(self, tenant_id: str) -> Json:
        """What the tenant owes."""
        return self._json("GET", f"/tenants/{tenant_id}/balance")

    def invoices(self, tenant_id: str | None) -> list[Json]:
        """Invoices and credit notes of a tenant; None: of all."""
        return list(
            self._pages("/invoices" if tenant_id is None else f"/tenants/{tenant_id}/invoices")
        )

    def draft_invoice(self, tenant_id: str, month: str) -> Json:
        """A month's draft, made or made again."""
        return self._json("POST", f"/tenants/{tenant_id}/invoices", json={"month": month})

    def invoice(self, tenant_id: str, invoice_id: str) -> Json:
        """One with its lines."""
        return self._json("GET", f"/tenants/{tenant_id}/invoices/{invoice_id}")

    def invoice_action(self, tenant_id: str, invoice_id: str, action: str, body: Json) -> Json:
        """`finalize` or `void`."""
        return self._json("POST", f"/tenants/{tenant_id}/invoices/{invoice_id}/{action}", json=body)

    def delete_invoice(self, tenant_id: str, invoice_id: str) -> None:
        """A draft is gone."""
        self._call("DELETE", f"/tenants/{tenant_id}/invoices/{invoice_id}")

    def invoice_document(self, tenant_id: str, invoice_id: str, kind: str) -> bytes:
        """The invoice as `html` or `pdf`."""
        path = f"/tenants/{tenant_id}/invoices/{invoice_id}/document.{kind}"
        return self._call("GET", path).content

    # ------------------------------------------------------------------------ anything

    def pages(self, path: str, **params: str) -> Iterator[Json]:
        """All objects of a list, page by page."""
        return self._pages(path, params)

    def text(self, path: str, **params: Any) -> str:  # noqa: ANN401 - the API's query parameters
        """A GET whose answer is no JSON, such as CSV."""
        return self._call("GET", path, params=params).text

    def call(
        self,
        method: str,
        path: str,
        body: Json | None = None,
        **params: Any,  # noqa: ANN401 - the API's query parameters
    ) -> Json:
        """One call; its answer, or {} where there is none.

        Raises:
            AdminApiError: refused, or not reached.
        """
        arguments: Json = {"params": params}
        if body is not None:
            arguments["json"] = body
        response = self._call(method, path, **arguments)
        return cast(Json, response.json()) if response.content else {}

    def chat(self, tenant_id: str, body: Json) -> Iterator[Json]:
        """The frames of a playground's answer, as they come; the last one that counts has the usage.

        Raises:
            AdminApiError: refused, not reached, or broken off: an answer without its end is not whole.
        """
        path = f"/tenants/{tenant_id}/playground"
        try:
            with self._http.stream("POST", path, json=body, timeout=CHAT_TIMEOUT_S) as response:
                if response.is_error:
                    response.read()
                    raise _refusal(response)
                for line in response.iter_lines():
                    if not line.startswith("data: "):
                        continue
                    data = line.removeprefix("data: ")
                    if data == "[DONE]":
                        return
                    frame = json.loads(data)
                    if "error" in frame:
                        error = frame["error"]
                        raise AdminApiError(error["message"], status=None, code=error.get("code"))
                    yield frame
        except httpx.TransportError as error:
            raise self._unreachable(error) from error
        raise AdminApiError("the answer broke off", status=None, code="incomplete_stream")

    def read(self, path: str) -> tuple[Json, str | None]:
        """A thing and its ETag, which `change` sends back."""
        response = self._call("GET", path)
        return cast(Json, response.json()), response.headers.get("etag")

    def change(self, method: str, path: str, body: Json | None, etag: str | None) -> Json:
        """Change what is still as it was read; its answer, or {} where there is none.

        Raises:
            AdminApiError: refused; or changed meanwhile (409): the message says what is there now.
        """
        arguments: Json = {} if body is None else {"json": body}
        if etag is not None:
            arguments["headers"] = {"if-match": etag}
        response = self._call(method, path, **arguments)
        return cast(Json, response.json()) if response.content else {}

    # ------------------------------------------------------------------------ transport

    def _pages(self, path: str, filters: Json | None = None) -> Iterator[Json]:
        after: str | None = None
        while True:
            params: Json = {"limit": PAGE_SIZE} | (filters or {})
            if after is not None:
                params["after"] = after
            page = self._json("GET", path, params=params)
            yield from page["data"]
            if not page.get("has_more"):
                return
            after = page["last_id"]

    def _json(self, method: str, path: str, **arguments: Any) -> Json:  # noqa: ANN401 - httpx's own
        return cast(Json, self._call(method, path, **arguments).json())

    def _call(self, method: str, path: str, **arguments: Any) -> httpx.Response:  # noqa: ANN401
        try:
            response = self._http.request(method, path, **arguments)
        except httpx.TransportError as error:
            raise self._unreachable(error) from error
        if response.is_error:
            raise _refusal(response)
        return response

    def _unreachable(self, error: httpx.TransportError) -> AdminApiError:
        return AdminApiError(
            f"the control API at {self.control_url} cannot be reached ({error}): "
            "is the fleet running?",
            status=None,
        )


def _webhooks_path(tenant_id: str | None) -> str:
    return "/webhooks" if tenant_id is None else f"/tenants/{tenant_id}/webhooks"


class _CountingFile(io.FileIO):
    """A file that tells how much of it has been read."""

    def __init__(self, path: Path, on_progress: Progress | None) -> None:
        super().__init__(path)
        self._on_progress = on_progress
        self._total_bytes = path.stat().st_size

    def read(self, size: int | None = -1, /) -> bytes:
        """As `FileIO.read`."""
        piece = super().read(-1 if size is None else size)
        if self._on_progress is not None:
            self._on_progress(self.tell(), self._total_bytes)
        return piece or b""


def _refusal(response: httpx.Response) -> AdminApiError:
    try:
        error: Mapping[str, Any] = response.json()["error"]
    except (ValueError, KeyError, TypeError):
        return AdminApiError(f"HTTP {response.status_code}", status=response.status_code)
    return AdminApiError(
        str(error.get("message") or f"HTTP {response.status_code}"),
        status=response.status_code,
        code=error.get("code"),
        param=error.get("param"),
    )
