"""Two people with one thing open: `ETag` names the version that was read, `If-Match` the one that is meant.

A change whose If-Match is not the version in force is refused (409) and says what is there now. Without
If-Match the last one wins, as scripts expect.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import Depends, Header, Response

from loraplex_platform.errors import ConflictError, InvalidRequestError

_FORM = re.compile(r'(?:W/)?"(\d{1,9})"')


class VersionConflictError(ConflictError):
    """Somebody else has changed it since it was read."""

    code = "version_conflict"


async def _if_match(
    if_match: Annotated[
        str | None,
        Header(
            max_length=64,
            description="The ETag that was read; a thing that has changed since is a 409.",
            examples=['"3"'],
        ),
    ] = None,
) -> int | None:
    if if_match is None or if_match.strip() == "*":
        return None
    match = _FORM.fullmatch(if_match.strip())
    if match is None:
        raise InvalidRequestError(
            'If-Match: send back the ETag as it was received, for example "3".', param="If-Match"
        )
    return int(match[1])


# The version that the caller means; None: whichever is there.
IfMatch = Annotated[int | None, Depends(_if_match)]


def set_etag(response: Response, version: int) -> None:
    """Name the version in the answer."""
    response.headers["etag"] = f'"{version}"'


def check_version(
    wanted: int | None, found: int, changes: Mapping[str, Any], current: Mapping[str, Any]
) -> None:
    """Refuse to change what is not what the caller has read.

    Args:
        wanted: of If-Match; None asks for nothing.
        found: of the row, which is locked.
        changes: what the caller wants to set, by field.
        current: what is there, for at least those fields, as the API shows it.

    Raises:
        VersionConflictError: another version; the message names the fields that differ.
    """
    if wanted is None or wanted == found:
        return
    differing = [
        f"{field} is {current[field]!r}" for field in changes if current[field] != changes[field]
    ]
    now = "; ".join(differing) or "what you set is there already"
    raise VersionConflictError(
        f"It has changed since you read it: version {found} now, {wanted} then. Now {now}. Read it "
        "again, then send the change with its new ETag.",
        param="If-Match",
    )
