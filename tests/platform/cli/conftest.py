"""What the commands' tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog


def _drop(*_: object) -> structlog.typing.EventDict:
    raise structlog.DropEvent


@pytest.fixture
def _quiet_server() -> Iterator[None]:
    """The server is in this process: its log must not be taken for what a command prints."""
    before = structlog.get_config()
    structlog.configure(processors=[_drop])
    yield
    structlog.configure(**before)
