"""JSON with what jsonb refuses, in a real Postgres."""

from __future__ import annotations

import json
from typing import Any

import pytest
from loraplex_platform.db.session import Database
from loraplex_platform.db.stored_json import to_stored_json
from sqlalchemy import bindparam, select
from sqlalchemy.dialects.postgresql import JSONB

PLAIN: dict[str, Any] = {"text": 'é 😀 "\\u0000" \\', "many": [1, 0.5, None, True], "": {}}


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        (PLAIN, PLAIN),
        ({"said": "a\0b"}, {"said": "a\ufffdb"}),
        ({"k\0": [["\0", "\\\0"]]}, {"k\ufffd": [["\ufffd", "\\\ufffd"]]}),
        ({"half": "\ud83d and \ude00"}, {"half": "\ufffd and \ufffd"}),
        ({"pair": ("\U0001f600",)}, {"pair": ["\U0001f600"]}),
    ],
)
async def test_what_comes_back(db: Database, given: dict[str, Any], stored: dict[str, Any]) -> None:
    async with db.sessions() as session:
        back = await session.scalar(select(bindparam("value", given, type_=JSONB)))

    assert back == stored


def test_what_jsonb_can_hold_is_not_touched() -> None:
    assert to_stored_json(PLAIN) == json.dumps(PLAIN)
