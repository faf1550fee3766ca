"""The journal: on disk before it returns, found again after a crash, bounded."""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loraplex_engine.errors import ConfigError
from loraplex_engine.journal import Journal, JournalError
from loraplex_engine.protocol import JournalEntry, Usage


def make_entry(name: str, *, attempt: int = 1, completion_tokens: int = 3) -> JournalEntry:
    return JournalEntry(
        seq=0,
        request_id=name,
        attempt=attempt,
        lease_token=7,
        tenant_id="t1",
        adapter_digest=None,
        finish_reason="stop",
        usage=Usage(prompt_tokens=5, completion_tokens=completion_tokens),
        ended_at_unix_s=1.5,
    )


def segment_paths(folder: Path) -> list[Path]:
    return sorted(folder.glob("[0-9]*.log"))


def test_entries_are_numbered_and_found_by_attempt(tmp_path: Path) -> None:
    journal = Journal(tmp_path)

    journal.append([make_entry("a"), make_entry("b")])
    journal.append([make_entry("a", attempt=2)])

    assert [(e.seq, e.request_id) for e in journal.read(0, 10)] == [(1, "a"), (2, "b"), (3, "a")]
    found = journal.find("a", 2)
    assert found is not None
    assert (found.seq, found.usage.completion_tokens) == (3, 3)
    assert journal.find("a", 3) is None
    assert journal.find("c", 1) is None
    journal.close()


def test_reopening_keeps_entries_id_and_numbers(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append([make_entry("a")])
    journal_id = journal.journal_id
    journal.close()

    journal = Journal(tmp_path)
    journal.append([make_entry("b")])

    assert journal.journal_id == journal_id
    assert [(e.seq, e.request_id) for e in journal.read(0, 10)] == [(1, "a"), (2, "b")]
    journal.close()


@given(cut=st.integers(min_value=1, max_value=200), junk=st.binary(max_size=40))
@settings(max_examples=60, deadline=None)
def test_torn_tail_loses_only_the_torn_entries(
    tmp_path_factory: pytest.TempPathFactory, cut: int, junk: bytes
) -> None:
    folder = tmp_path_factory.mktemp("journal")
    journal = Journal(folder)
    sizes = [0]
    (path,) = segment_paths(folder)
    for i in range(4):
        journal.append([make_entry(f"r{i}", completion_tokens=i)])
        sizes.append(path.stat().st_size)
    journal.close()
    end = max(0, sizes[-1] - cut)
    written = path.read_bytes()
    os.truncate(path, end)
    with path.open("ab") as file:
        file.write(junk)

    journal = Journal(folder)

    # Junk can complete a cut record only by being its very bytes.
    found = written[:end] + junk
    intact = next(
        (i for i, (a, b) in enumerate(zip(written, found, strict=False)) if a != b),
        min(len(written), len(found)),
    )
    whole = max(i for i, size in enumerate(sizes) if size <= intact)
    assert [e.request_id for e in journal.read(0, 10)] == [f"r{i}" for i in range(whole)]
    journal.append([make_entry("next")])
    assert [e.seq for e in journal.read(whole, 10)] == [whole + 1]
    journal.close()
    journal = Journal(folder)
    assert journal.find("next", 1) is not None
    journal.close()


@pytest.mark.parametrize("num_zeros", [1, 8, 4096])
def test_a_tail_of_zeros_is_cut_off(tmp_path: Path, num_zeros: int) -> None:
    journal = Journal(tmp_path)
    journal.append([make_entry("a")])
    journal.close()
    (path,) = segment_paths(tmp_path)
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write(bytes(num_zeros))

    journal = Journal(tmp_path)

    assert path.stat().st_size == size
    journal.append([make_entry("b")])
    assert [(e.seq, e.request_id) for e in journal.read(0, 10)] == [(1, "a"), (2, "b")]
    journal.close()


def test_a_whole_record_of_another_version_stops_the_start_and_stays(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append([make_entry("a")])
    journal.close()
    (path,) = segment_paths(tmp_path)
    payload = msgspec.msgpack.encode({"seq": 2, "what": "new"})
    with path.open("ab") as file:
        file.write(struct.pack("<II", len(payload), zlib.crc32(payload)) + payload)
    content = path.read_bytes()

    for _ in range(2):  # the lock is free again after the first
        with pytest.raises(ConfigError, match="version"):
            Journal(tmp_path)

    assert path.read_bytes() == content


@pytest.mark.parametrize("bad", range(9))  # of ten records; behind the last is nothing
def test_a_bad_record_amid_good_ones_stays_and_its_numbers_are_not_used_again(
    tmp_path: Path, bad: int
) -> None:
    journal = Journal(tmp_path)
    (path,) = segment_paths(tmp_path)
    starts = []
    for i in range(10):
        starts.append(path.stat().st_size)
        journal.append([make_entry(f"r{i}")])
    journal.close()
    content = bytearray(path.read_bytes())
    content[starts[bad] + 30] ^= 1
    path.write_bytes(content)

    for num_starts in range(1, 3):
        journal = Journal(tmp_path)
        assert journal.next_seq == 10 + num_starts
        journal.append([make_entry(f"new{num_starts}")])
        journal.close()

    journal = Journal(tmp_path)
    page = journal.read(0, 100)
    assert [e.request_id for e in page] == [*(f"r{i}" for i in range(bad)), "new1", "new2"]
    assert [e.seq for e in page] == [*range(1, bad + 1), 11, 12]
    assert [e.seq for e in journal.read(bad + 1, 1)] == [11]
    assert path.read_bytes() == content
    journal.close()


def test_old_segments_go_and_numbers_go_on(tmp_path: Path) -> None:
    journal = Journal(tmp_path, segment_bytes=400, max_segments=3)
    for i in range(40):
        journal.append([make_entry(f"r{i}")])

    assert len(segment_paths(tmp_path)) == 3
    entries = journal.read(0, 100)
    assert [e.seq for e in entries] == list(range(41 - len(entries), 41))
    assert 0 < len(entries) < 40
    assert journal.num_entries == len(entries)
    assert journal.find("r0", 1) is None
    assert journal.find("r39", 1) is not None
    journal.close()

    journal = Journal(tmp_path, segment_bytes=400, max_segments=3)
    assert [e.seq for e in journal.read(0, 100)] == [e.seq for e in entries]
    assert journal.next_seq == 41
    journal.close()


@pytest.mark.parametrize("after_seq", [0, 1, 3, 9, 18, 19, 20, 1000])
@pytest.mark.parametrize("limit", [1, 3, 1000])
def test_paging_sees_every_entry_once(tmp_path: Path, after_seq: int, limit: int) -> None:
    journal = Journal(tmp_path, segment_bytes=400, max_segments=100)
    for i in range(20):
        journal.append([make_entry(f"r{i}")])

    page = journal.read(after_seq, limit)

    expected = list(range(after_seq + 1, 21))[:limit]
    assert [e.seq for e in page] == expected
    assert [e.request_id for e in page] == [f"r{seq - 1}" for seq in expected]
    journal.close()


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    journal = Journal(tmp_path)

    with pytest.raises(ConfigError, match="journal-dir"):
        Journal(tmp_path)

    journal.close()
    Journal(tmp_path).close()


def test_a_whole_step_costs_one_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path)
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", synced.append)

    journal.append([make_entry(f"r{i}") for i in range(64)])
    journal.append([])

    assert len(synced) == 1
    journal.close()


def test_a_full_disk_is_an_error_not_a_silent_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path)
    journal.append([make_entry("a")])

    def refuse(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fdatasync", refuse)
    with pytest.raises(JournalError, match="No space"):
        journal.append([make_entry("b")])

    assert journal.find("b", 1) is None
    journal.close()


def test_an_entry_too_long_to_be_read_again_is_not_written(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append([make_entry("a")])

    with pytest.raises(JournalError, match="at most"):
        journal.append([make_entry("b"), make_entry("x" * (1 << 20))])

    journal.append([make_entry("c")])
    journal.close()
    journal = Journal(tmp_path)
    assert [(e.seq, e.request_id) for e in journal.read(0, 9)] == [(1, "a"), (2, "c")]
    journal.close()


def test_files_are_private(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    Journal(folder).close()

    assert folder.stat().st_mode & 0o077 == 0
    assert all(path.stat().st_mode & 0o077 == 0 for path in segment_paths(folder))
