"""Where uploads lie meanwhile: a few at a time, on the store's volume, nothing left by the dead."""

from __future__ import annotations

import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from loraplex_platform.errors import UnavailableError
from loraplex_platform.registry import quarantine
from loraplex_platform.registry.quarantine import Quarantine, default_root

HOLD = """
import sys, pathlib
from loraplex_platform.registry.quarantine import Quarantine
with Quarantine.opened(pathlib.Path(sys.argv[1])) as held:
    (held._folder / "upload").write_bytes(b"x")
    print("held", flush=True)
    sys.stdin.read()
"""


def _folders(root: Path) -> list[Path]:
    return [path for path in root.iterdir() if path.is_dir()]


def test_what_a_killed_process_left_goes_and_what_a_living_one_works_on_stays(
    tmp_path: Path,
) -> None:
    root = tmp_path / "store" / "quarantine"
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stdout.readline() == b"held\n"
    [theirs] = _folders(root)

    with Quarantine.opened(root):
        assert (theirs / "upload").exists()
        assert len(_folders(root)) == 2
    assert _folders(root) == [theirs]
    child.kill()
    child.wait()
    child.stdin.close()
    child.stdout.close()
    assert (theirs / "upload").exists()

    with Quarantine.opened(root):
        assert not theirs.exists()
    assert _folders(root) == []


async def test_only_so_many_uploads_are_received_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quarantine, "WAIT_S", 0.05)
    with Quarantine.opened(tmp_path) as uploads:
        async with AsyncExitStack() as stack:
            made = [
                await stack.enter_async_context(uploads.folder())
                for _ in range(quarantine.MAX_UPLOADS)
            ]
            assert len(set(made)) == quarantine.MAX_UPLOADS

            with pytest.raises(UnavailableError, match="Too many uploads"):
                await stack.enter_async_context(uploads.folder())
        assert not any(path.exists() for path in made)

        async with uploads.folder() as again:
            assert again.is_dir()


def test_it_lies_on_the_stores_volume_if_the_store_is_a_folder() -> None:
    assert default_root("file:///var/lib/a%20b/store") == Path("/var/lib/a b/store/quarantine")
    assert default_root("s3://bucket/x").is_absolute()
