"""Telling stored adapters that nobody has put for a while, and deleting them."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
from loraplex_engine.artifact import ADAPTER_FILES, AdapterNotStoredError, AdapterStore

HOUR_S = 3600.0
DIGEST = "sha256:" + "a" * 64


@pytest.fixture(params=["file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> AdapterStore:
    if request.param == "file":
        return AdapterStore((tmp_path / "store").as_uri())
    return AdapterStore(f"memory://{uuid.uuid4().hex}")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    for name in ADAPTER_FILES:
        (folder / name).write_bytes(b"x")
    return folder


def test_what_was_put_just_now_is_neither_idle_nor_deleted(
    store: AdapterStore, source: Path, tmp_path: Path
) -> None:
    assert store.idle(0.0) == []
    store.put(source, DIGEST)

    assert store.idle(HOUR_S) == []
    assert not store.delete(DIGEST, age_s=HOUR_S)
    assert store.idle(-HOUR_S) == [DIGEST]
    assert store.has(DIGEST)

    assert store.delete(DIGEST, age_s=-HOUR_S)

    assert not store.has(DIGEST)
    assert store.idle(-HOUR_S) == []
    assert not store.delete(DIGEST, age_s=-HOUR_S)
    with pytest.raises(AdapterNotStoredError):
        store.fetch(DIGEST, tmp_path / "into")
