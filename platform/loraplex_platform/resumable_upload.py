"""Upload an adapter from here in pieces: what a cut or a Ctrl-C leaves is gone on with, not sent again.

Which upload goes on is remembered under $XDG_STATE_HOME/loraplex/uploads, by server, tenant, adapter name
and the files' sha256: a folder that has changed since is another upload.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final, TypeVar

from loraplex_engine.artifact import ADAPTER_FILES

from loraplex_platform.admin_client import AdminApiError, AdminClient, Json, Progress

PIECE_BYTES: Final = 8 << 20
_READ_BYTES: Final = 1 << 20
# Tries in a row without a byte of progress, and the longest wait between two.
MAX_TRIES: Final = 10
MAX_WAIT_S: Final = 10.0
# Answers of a server that does not have the upload (any more).
_LOST: Final = frozenset({"not_found", "upload_expired", "upload_not_here", "upload_ended"})
_PASSING: Final = frozenset({"upload_busy", "upload_cut", "wrong_offset"})

T = TypeVar("T")


class _UploadLostError(Exception):
    """The server does not know the upload any more: begin another one."""


def state_folder() -> Path:
    """Where unfinished uploads are remembered."""
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser() / "loraplex" / "uploads"


@dataclass(frozen=True, slots=True)
class ResumableUpload:
    """One adapter on its way.

    Args:
        admin: of the control API.
        tenant_id: whose it is.
        name: of the adapter.
        folder: that PEFT saved.
        is_probed: False: checked, but not asked anything.
        on_progress: told how much is there: at first, and after each piece.
        wait: seconds between tries.
        states: where uploads are remembered.
    """

    admin: AdminClient
    tenant_id: str
    name: str
    folder: Path
    is_probed: bool = True
    on_progress: Progress | None = None
    wait: Callable[[float], None] = time.sleep
    states: Path = field(default_factory=state_folder)

    def run(self) -> Json:
        """Send what is not there yet and have it checked; the adapter with its version.

        Raises:
            AdminApiError: refused; or not reached, many times in a row: run it again to go on.
            OSError: a file could not be read.
        """
        files = [_describe(self.folder / file_name) for file_name in ADAPTER_FILES]
        plan = {"name": self.name, "files": files, "probe": self.is_probed}
        key = json.dumps([self.admin.control_url, self.tenant_id, plan], sort_keys=True)
        state = self.states / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
        upload_id = _remembered(state)
        try:
            if upload_id is None:
                raise _UploadLostError
            adapter = self._go_on(upload_id, files)
        except _UploadLostError:
            upload_id = str(self.admin.begin_upload(self.tenant_id, plan)["id"])
            _remember(state, upload_id)
            adapter = self._begun(upload_id, files, state)
        except AdminApiError as error:
            _forget_if_final(state, error)
            raise
        state.unlink(missing_ok=True)
        return adapter

    def _begun(self, upload_id: str, files: list[Json], state: Path) -> Json:
        try:
            return self._go_on(upload_id, files)
        except _UploadLostError as error:
            state.unlink(missing_ok=True)
            raise AdminApiError(
                "the server has lost an upload that was just begun: do its control processes share"
                " LORAPLEX_QUARANTINE_DIR?",
                status=None,
                code="upload_not_here",
            ) from error
        except AdminApiError as error:
            _forget_if_final(state, error)
            raise

    def _go_on(self, upload_id: str, files: list[Json]) -> Json:
        total_bytes = sum(int(file["size_bytes"]) for file in files)
        sent_bytes = 0
        for file in files:
            self._send(upload_id, file, sent_bytes, total_bytes)
            sent_bytes += int(file["size_bytes"])
        return self._retried(lambda: self.admin.complete_upload(self.tenant_id, upload_id))

    def _send(self, upload_id: str, file: Json, before_bytes: int, total_bytes: int) -> None:
        file_name, size_bytes = str(file["name"]), int(file["size_bytes"])

        def ask() -> int:
            return self.admin.upload_offset(self.tenant_id, upload_id, file_name)

        offset = self._retried(ask)
        tries = 0
        with (self.folder / file_name).open("rb") as source:
            while True:
                if self.on_progress is not None:
                    self.on_progress(before_bytes + offset, total_bytes)
                if offset >= size_bytes:
                    return
                length = min(PIECE_BYTES, size_bytes - offset)
                try:
                    reached = self.admin.append_bytes(
                        self.tenant_id,
                        upload_id,
                        file_name,
                        offset,
                        _pieces(source, offset, length),
                    )
                except AdminApiError as error:
                    self._wait_for(error, tries)
                    reached = self._retried(ask)
                tries = 0 if reached > offset else tries + 1
                offset = reached

    def _retried(self, call: Callable[[], T]) -> T:
        tries = 0
        while True:
            try:
                return call()
            except AdminApiError as error:
                self._wait_for(error, tries)
            tries += 1

    def _wait_for(self, error: AdminApiError, tries: int) -> None:
        """Wait before the next try, or raise what another one would not mend."""
        if error.code in _LOST or error.status == 404:
            raise _UploadLostError from error
        is_away = error.status is None or error.status in (429, 502, 503, 504)
        if not (is_away or error.code in _PASSING) or tries + 1 >= MAX_TRIES:
            raise error
        self.wait(min(MAX_WAIT_S, 0.25 * 2**tries))


def _forget_if_final(state: Path, error: AdminApiError) -> None:
    """Refused bytes are refused again: the next call begins with what the folder holds then."""
    if error.code == "adapter_rejected":
        state.unlink(missing_ok=True)


def _pieces(source: BinaryIO, offset: int, length: int) -> Iterator[bytes]:
    source.seek(offset)
    while length and (piece := source.read(min(_READ_BYTES, length))):
        length -= len(piece)
        yield piece


def _describe(path: Path) -> Json:
    digest = hashlib.sha256()
    size_bytes = 0
    with path.open("rb") as file:
        while piece := file.read(_READ_BYTES):
            digest.update(piece)
            size_bytes += len(piece)
    return {"name": path.name, "size_bytes": size_bytes, "sha256": digest.hexdigest()}


def _remembered(state: Path) -> str | None:
    with suppress(OSError, ValueError, KeyError, TypeError):
        return str(json.loads(state.read_text())["upload_id"])
    return None


def _remember(state: Path, upload_id: str) -> None:
    with suppress(OSError):  # without a place for it, a cut upload begins anew
        state.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        partial = state.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps({"upload_id": upload_id}))
        partial.replace(state)
