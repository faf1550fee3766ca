"""Native kernels are built once, found again, and their absence is said, not crashed on."""

from __future__ import annotations

from pathlib import Path

import pytest
from loraplex_kernels.cpu import build
from loraplex_kernels.cpu.build import NativeBuildError, load_library

SOURCE = "int answer(void) { return %d; }\n"


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    load_library("pool", tmp_path / "pool")  # which others need, and is loaded once a process
    folder = tmp_path / "sources"
    folder.mkdir()
    monkeypatch.setattr(build, "SOURCES", folder)
    return folder


def test_a_library_is_built_once_and_anew_when_its_source_changes(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    (sources / "k.c").write_text(SOURCE % 42)
    assert load_library("k", cache).answer() == 42
    built = list(cache.iterdir())

    monkeypatch.setattr(build, "_compile", lambda *_: pytest.fail("it is in the cache"))
    assert load_library("k", cache).answer() == 42
    assert list(cache.iterdir()) == built
    monkeypatch.undo()
    monkeypatch.setattr(build, "SOURCES", sources)

    (sources / "k.c").write_text(SOURCE % 43)
    assert load_library("k", cache).answer() == 43
    assert len(list(cache.iterdir())) == 2, "no partial file is left, and the old one still serves"
    assert cache.stat().st_mode & 0o777 == 0o700


def test_code_that_does_not_compile_is_reported_and_leaves_nothing(
    sources: Path, tmp_path: Path
) -> None:
    (sources / "k.c").write_text('#error "not on this machine"\n')

    with pytest.raises(NativeBuildError, match="not on this machine"):
        load_library("k", tmp_path / "cache")

    assert list((tmp_path / "cache").iterdir()) == []


def test_no_compiler_is_reported(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (sources / "k.c").write_text(SOURCE % 1)
    monkeypatch.setattr(build.shutil, "which", lambda _: None)

    with pytest.raises(NativeBuildError, match="no C compiler"):
        load_library("k", tmp_path / "cache")


def test_a_damaged_library_is_reported(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (sources / "k.c").write_text(SOURCE % 7)

    def write_rubbish(compiler: str, source: Path, library: Path) -> None:
        library.parent.mkdir()
        library.write_bytes(b"not a library")

    monkeypatch.setattr(build, "_compile", write_rubbish)

    with pytest.raises(NativeBuildError, match="cannot load"):
        load_library("k", tmp_path / "cache")


def test_a_library_that_was_cut_short_is_built_again(sources: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    (sources / "k.c").write_text(SOURCE % 5)
    cache.mkdir()
    _compiler, damaged = build._library_path("k", cache)
    damaged.write_bytes(b"")

    assert load_library("k", cache).answer() == 5
    assert damaged.stat().st_size > 0
