"""What may be imported: the operator's list of prefixes, and who may use which.

    LORAPLEX_IMPORT_SOURCES=hf://,s3://adapters/{tenant}/,file:///srv/adapters/{tenant}/

`{tenant}` stands for the slug of the tenant that imports: such a prefix is that tenant's, for all of its
people who may upload. A prefix without it is everybody's place, where one tenant could read another's
files: only platform admins import from it. The public hub is the exception: without a token of ours
everybody reads the same there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final
from urllib.parse import urlsplit

from loraplex_platform.errors import InvalidRequestError, PermissionDeniedError

TENANT: Final = "{tenant}"
SCHEMES: Final = ("file", "s3", "gs", "hf")
_PLAIN: Final = re.compile(r"[A-Za-z0-9._~@=+ ,()!-]+")
_HUB: Final = re.compile(
    r"hf://(?P<repo>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9_][\w.-]{0,95})(?:@(?P<revision>[\w.-]{1,120}))?"
    r"(?P<folder>(?:/[\w.-]{1,100}){0,8})"
)


class SourceNotAllowedError(PermissionDeniedError):
    """The operator's list does not have it, for this caller."""

    code = "source_not_allowed"

    def __init__(self, message: str) -> None:
        super().__init__(message, param="source")


@dataclass(frozen=True, slots=True)
class HubName:
    """hf://org/name@revision/folder, taken apart."""

    repo: str
    revision: str
    folder: str


@dataclass(frozen=True, slots=True)
class ImportRules:
    """The list; see the module's header."""

    prefixes: tuple[str, ...]
    has_hub_token: bool

    @classmethod
    def parse(cls, text: str, *, has_hub_token: bool) -> ImportRules:
        """The rules of the setting.

        Raises:
            ValueError: a prefix that could never match, named.
        """
        prefixes = tuple(part.strip() for part in text.split(",") if part.strip())
        for prefix in prefixes:
            parts = urlsplit(prefix.replace(TENANT, "tenant"))
            is_whole = prefix.endswith("/")
            if parts.scheme not in SCHEMES:
                why = f"begin it with one of {', '.join(s + '://' for s in SCHEMES)}"
            elif not is_whole:
                why = "end it with '/', so that it names a folder and not the beginning of a name"
            elif parts.scheme == "file" and (parts.netloc or parts.path == "/"):
                why = "write file:///absolute/folder/"
            elif parts.scheme in ("s3", "gs") and (
                not parts.netloc or TENANT in prefix.split("/")[2]
            ):
                why = f"name a bucket: {parts.scheme}://bucket/"
            elif TENANT in prefix and TENANT not in prefix.split("/"):
                why = f"{TENANT} must be a whole part of the path"
            else:
                continue
            raise ValueError(f"LORAPLEX_IMPORT_SOURCES: {prefix!r}: {why}")
        return cls(prefixes, has_hub_token)

    def check(self, source: str, *, tenant_slug: str, is_operator: bool) -> None:
        """Raise unless this caller may import from there.

        Raises:
            InvalidRequestError: not a source's form.
            SourceNotAllowedError: no prefix of the list allows it.
        """
        _check_form(source)
        if not self.prefixes:
            raise SourceNotAllowedError(
                "source: nothing may be imported here; the operator allows places with LORAPLEX_IMPORT_SOURCES."
            )
        for prefix in self.prefixes:
            own = prefix.replace(TENANT, tenant_slug)
            if not source.startswith(own):
                continue
            is_public = prefix.startswith("hf://") and not self.has_hub_token
            if TENANT in prefix or is_operator or is_public:
                return
        raise SourceNotAllowedError(
            "source: it is not below a place that you may import from; ask the operator, whose list is"
            " LORAPLEX_IMPORT_SOURCES."
        )

    def root_of(self, source: str, tenant_slug: str) -> str:
        """The longest prefix that a source is below; nothing above it is ever followed."""
        roots = [prefix.replace(TENANT, tenant_slug) for prefix in self.prefixes]
        return max((root for root in roots if source.startswith(root)), key=len)


def parse_hub(source: str) -> HubName:
    """Take a hub's name apart; the revision is `main` unless one is given.

    Raises:
        InvalidRequestError: it is none.
    """
    match = _HUB.fullmatch(source)
    if match is None or ".." in source:
        raise _malformed(
            "write hf://organisation/name@revision, with /folder behind if it is in one"
        )
    return HubName(match["repo"], match["revision"] or "main", match["folder"].strip("/"))


def _check_form(source: str) -> None:
    scheme, separator, rest = source.partition("://")
    if not separator or scheme not in SCHEMES:
        raise _malformed(
            "write hf://organisation/name@revision, s3://bucket/folder, gs://bucket/folder or file:///folder"
        )
    if scheme == "hf":
        parse_hub(source)
        return
    path = rest.removeprefix("/") if scheme == "file" else rest
    parts: Sequence[str] = path.rstrip("/").split("/")
    # Nothing that a file system, a URL or a glob would read as anything but a name.
    if any(part in ("", ".", "..") or not _PLAIN.fullmatch(part) for part in parts):
        raise _malformed(
            "write a plain path: letters, digits and . _ - = + @, no '..', '*', '?' or '%'"
        )
    if scheme == "file" and not PurePosixPath(rest).is_absolute():
        raise _malformed("write file:///absolute/folder")


def _malformed(remedy: str) -> InvalidRequestError:
    return InvalidRequestError(f"source: {remedy}.", param="source")
