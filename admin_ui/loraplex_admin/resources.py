"""The control API's lists, each as a `Collection`: what it holds is under its path and spoken to in one way.

Rows keep the API's own field names, so that its reference is the documentation of what pages read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import quote

if TYPE_CHECKING:
    from loraplex_admin.api import Api, Page

Row: TypeAlias = dict[str, Any]
PAGE_SIZE = 50


@dataclass(frozen=True, slots=True)
class Collection:
    """A list of the control API and what can be done to what is in it.

    Raises (all methods):
        ApiError: the API refused, and says why.
        ApiUnreachableError: it does not answer.
    """

    api: Api
    path: str

    def page(
        self, *, after: str | None = None, limit: int = PAGE_SIZE, **query: str | None
    ) -> Page[Row]:
        """One page, newest first; of `query` what is None is not asked."""
        return self.api.page(self.path, after=after, limit=limit, **query)

    def get(self, id_: str, **query: str | None) -> Row:
        """One by its id."""
        return self.api.read(self._of(id_), **query)

    def part(self, id_: str, name: str, **query: str | None) -> Row:
        """Something that belongs to one of these: the metrics of a rollout, say."""
        return self.api.read(f"{self._of(id_)}/{name}", **query)

    def create(self, body: Row, *, once: str | None = None) -> Row:
        """A new one. `once`: the Idempotency-Key under which it is made only once."""
        return self.api.send("POST", self.path, body, once=once)

    def change(self, id_: str, body: Row, *, version: int | None = None) -> Row:
        """Change what the body names. `version`: refused with a 409 if it is another one by now."""
        return self.api.send("PATCH", self._of(id_), body, version=version)

    def put(self, id_: str, body: Row, *, version: int | None = None) -> Row:
        """Make or replace the one of this name."""
        return self.api.send("PUT", self._of(id_), body, version=version)

    def act(
        self,
        id_: str,
        verb: str,
        body: Row | None = None,
        *,
        version: int | None = None,
        once: str | None = None,
    ) -> Row:
        """What is not a change of fields: `rotate`, `publish`, `finalize`."""
        return self.api.send("POST", f"{self._of(id_)}/{verb}", body, version=version, once=once)

    def remove(self, id_: str, *, version: int | None = None, **query: str | None) -> None:
        """End one: delete, revoke, withdraw, as its kind has it."""
        self.api.send("DELETE", self._of(id_), version=version, query=query)

    def under(self, id_: str, name: str) -> Collection:
        """A list of one of these: the deliveries of a webhook, say."""
        return Collection(self.api, f"{self._of(id_)}/{name}")

    def download(self, id_: str, name: str) -> bytes:
        """A file of one of these."""
        return self.api.download(f"{self._of(id_)}/{name}")

    def _of(self, id_: str) -> str:
        return f"{self.path}/{segment(id_)}"


def segment(text: str) -> str:
    """Typed text as one segment of a path, whatever is in it."""
    quoted = quote(text, safe="")
    # Dots alone would be taken for a step up.
    return quoted if quoted.strip(".") else quoted.replace(".", "%2E")
