"""The store on a real S3 server, and what it says when a place is away, not there or not served."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from loraplex_engine.artifact import (
    ADAPTER_FILES,
    AdapterLimits,
    AdapterNotStoredError,
    AdapterStore,
    ArtifactError,
    StoreUnavailableError,
)

from tests.support.adapter_files import make_adapter
from tests.support.s3_server import S3Server, s3_server

pytest.importorskip("s3fs")
HOUR_S = 3600.0


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


@pytest.fixture
def store(s3: S3Server, tmp_path: Path) -> AdapterStore:
    return AdapterStore(f"s3://{s3.bucket}/{tmp_path.name}")


def test_what_is_put_is_loaded_once_it_is_checked(store: AdapterStore, tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "a")
    store.check()
    assert not store.has(adapter.digest)
    with pytest.raises(AdapterNotStoredError):
        store.load(adapter.digest, tmp_path / "cache", limits=AdapterLimits())

    store.put(tmp_path / "a", adapter.digest)
    store.put(tmp_path / "a", adapter.digest)

    assert store.has(adapter.digest)
    loaded = store.load(adapter.digest, tmp_path / "cache", limits=AdapterLimits())
    assert loaded.digest == adapter.digest
    assert store.idle(HOUR_S) == []
    assert store.idle(-HOUR_S) == [adapter.digest]
    assert not store.delete(adapter.digest, age_s=HOUR_S)
    assert store.delete(adapter.digest, age_s=-HOUR_S)
    assert not store.has(adapter.digest)


def test_another_process_sees_at_once_what_was_put(store: AdapterStore, tmp_path: Path) -> None:
    """Two clients of one bucket: no listing that is remembered hides anything."""
    adapter = make_adapter(tmp_path / "a")
    other = AdapterStore(store.url)
    assert not other.has(adapter.digest)
    assert other.idle(-HOUR_S) == []

    store.put(tmp_path / "a", adapter.digest)

    assert other.has(adapter.digest)
    assert other.idle(-HOUR_S) == [adapter.digest]


def test_an_object_that_was_changed_is_refused_and_another_put_mends_it(
    store: AdapterStore, tmp_path: Path
) -> None:
    adapter = make_adapter(tmp_path / "a")
    changed = make_adapter(tmp_path / "b", seed=1)
    store.put(tmp_path / "a", adapter.digest)
    # As somebody who may write to the bucket: another sound adapter under this one's name.
    store.put(tmp_path / "b", adapter.digest)

    with pytest.raises(ArtifactError, match="the stored adapter is"):
        store.load(adapter.digest, tmp_path / "cache", limits=AdapterLimits())

    store.put(tmp_path / "a", adapter.digest)
    loaded = store.load(adapter.digest, tmp_path / "cache", limits=AdapterLimits())
    assert loaded.digest == adapter.digest != changed.digest


def test_readers_among_writers_never_see_half_an_adapter(
    store: AdapterStore, tmp_path: Path
) -> None:
    adapter = make_adapter(tmp_path / "a")
    start = threading.Barrier(5)

    def write() -> None:
        start.wait(30)
        store.put(tmp_path / "a", adapter.digest)

    def read() -> None:
        start.wait(30)
        for number in range(5):
            try:
                store.load(adapter.digest, tmp_path / f"c{number}", limits=AdapterLimits())
            except AdapterNotStoredError:
                continue

    with ThreadPoolExecutor(5) as threads:
        for future in [threads.submit(job) for job in (write, write, read, read, write)]:
            future.result(60)


def test_a_bucket_that_is_not_there_is_said(s3: S3Server, tmp_path: Path) -> None:
    store = AdapterStore("s3://no-such-bucket-here/x")

    with pytest.raises(StoreUnavailableError, match="no bucket no-such-bucket-here"):
        store.check()

    adapter = make_adapter(tmp_path / "a")
    with pytest.raises(OSError, match=r"."):
        store.put(tmp_path / "a", adapter.digest)


@pytest.mark.slow
def test_a_server_that_is_away_is_one_error_of_ours(tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "a")
    with s3_server("gone") as server:
        store = AdapterStore("s3://gone/store")
        store.put(tmp_path / "a", adapter.digest)
        server.stop()

        for call in (
            store.check,
            lambda: store.has(adapter.digest),
            lambda: store.put(tmp_path / "a", adapter.digest),
            lambda: store.load(adapter.digest, tmp_path / "cache", limits=AdapterLimits()),
            lambda: store.idle(0.0),
        ):
            with pytest.raises(StoreUnavailableError, match="s3://gone/store"):
                call()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("ftp://host/x", "use file://, s3:// or gs://"),
        ("http://host/x", "use file://, s3:// or gs://"),
        ("s3:///x", "names no bucket"),
        ("s3://key:secret@bucket/x", "come from the environment"),
        ("s3://bucket/x?anon=true", "come from the environment"),
    ],
)
def test_urls_that_are_no_store_say_what_one_is(url: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        AdapterStore(url)


@pytest.mark.parametrize(
    ("scheme", "package", "extra"), [("s3", "s3fs", "s3"), ("gs", "gcsfs", "gcs")]
)
def test_a_package_that_is_missing_is_named_with_its_extra(
    scheme: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known: dict[str, object] = sys.modules["fsspec.registry"]._registry
    monkeypatch.setitem(sys.modules, package, None)
    for name in ("s3", "gs"):
        monkeypatch.delitem(known, name, raising=False)  # a class that was imported before

    with pytest.raises(ValueError, match=rf"needs the package {package}.*loraplex\[{extra}\]"):
        AdapterStore(f"{scheme}://bucket/x")


@pytest.mark.parametrize("place", ["file", "memory"])
def test_every_put_writes_whoever_was_there_before(place: str, tmp_path: Path) -> None:
    """The same work the second time: nothing that could be timed tells whether a digest is known."""
    url = f"file://{tmp_path}/store" if place == "file" else f"memory://{tmp_path.name}"
    store = AdapterStore(url)
    adapter = make_adapter(tmp_path / "a")
    store.put(tmp_path / "a", adapter.digest)
    first = store.fetch(adapter.digest, tmp_path / "c1")
    before = {name: (first / name).stat().st_ino for name in ADAPTER_FILES}

    store.put(tmp_path / "a", adapter.digest)

    second = store.fetch(adapter.digest, tmp_path / "c2")
    after = {name: (second / name).stat().st_ino for name in ADAPTER_FILES}
    assert all(before[name] != after[name] for name in ADAPTER_FILES)
    assert store.load(adapter.digest, tmp_path / "c3", limits=AdapterLimits())


def test_a_file_changed_on_disk_is_refused_and_another_put_mends_it(tmp_path: Path) -> None:
    store = AdapterStore(f"file://{tmp_path}/store")
    adapter = make_adapter(tmp_path / "a")
    make_adapter(tmp_path / "b", seed=1)
    store.put(tmp_path / "a", adapter.digest)
    stored = store.fetch(adapter.digest, tmp_path) / ADAPTER_FILES[1]
    stored.write_bytes((tmp_path / "b" / ADAPTER_FILES[1]).read_bytes())

    with pytest.raises(ArtifactError, match="the stored adapter is"):
        store.load(adapter.digest, tmp_path, limits=AdapterLimits())

    store.put(tmp_path / "a", adapter.digest)
    assert store.load(adapter.digest, tmp_path, limits=AdapterLimits()).digest == adapter.digest
