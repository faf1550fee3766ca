"""Receive an adapter upload: multipart parts streamed to quarantine files, hashed and capped.

Nothing a client sends decides where a byte is written: the field decides the file, and a file name
is only checked. What is not one of the known parts ends the upload at once.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from fastapi import Request
from loraplex_engine.artifact import CONFIG_FILE, TENSORS_FILE, ArtifactError, check_file_name
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from loraplex_platform.errors import BodyTooLargeError, InvalidRequestError
from loraplex_platform.registry.errors import AdapterRejectedError
from loraplex_platform.registry.quarantine import Quarantine

NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")
MAX_CONFIG_BYTES = 1 << 20
MAX_FIELD_BYTES = 1024
MULTIPART_OVERHEAD_BYTES = 2 << 20  # the config, the small fields and the boundaries
_WRITE_BYTES = 1 << 20
_SHA256 = re.compile(r"[0-9a-f]{64}")

_FILES = {"adapter_config": CONFIG_FILE, "adapter_model": TENSORS_FILE}
_FIELDS = frozenset({"name", "tokenizer_sha256", "chat_template_sha256", "probe"})
_BOOLEANS = {"true": True, "false": False}


@dataclass(frozen=True, slots=True)
class Upload:
    """A complete upload in its quarantine folder."""

    folder: Path  # holds exactly the adapter's two files
    name: str
    tokenizer_sha256: str | None
    chat_template_sha256: str | None
    is_probed: bool  # asked some questions beside the base, before it becomes a version
    fingerprint: bytes  # of everything above
    source: str | None = None  # where it was imported from, pinned; None: somebody sent it


@dataclass
class _Part:
    name: str = ""
    file: BinaryIO | None = None
    limit: int = MAX_FIELD_BYTES
    size: int = 0
    data: bytearray = field(default_factory=bytearray)


class _Receiver:
    """python-multipart's callbacks. They only sort bytes; writing happens off the event loop."""

    def __init__(self, boundary: bytes, folder: Path, max_model_bytes: int) -> None:
        self.fields: dict[str, str] = {}
        self.hashes: dict[str, str] = {}
        self._folder = folder
        self._limits = {"adapter_config": MAX_CONFIG_BYTES, "adapter_model": max_model_bytes}
        self._part = _Part()
        self._hash = hashlib.sha256()
        self._header_name = b""
        self._header_value = b""
        self._disposition = b""
        self.is_complete = False
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._on_part_begin,
                "on_header_field": self._on_header_field,
                "on_header_value": self._on_header_value,
                "on_header_end": self._on_header_end,
                "on_headers_finished": self._on_headers_finished,
                "on_part_data": self._on_part_data,
                "on_part_end": self._on_part_end,
                "on_end": self._on_end,
            },
        )

    def write(self, chunk: bytes) -> None:
        """Parse, hash and store some bytes; runs in a thread."""
        self._parser.write(chunk)

    def close(self) -> None:
        """Close the file of a part that never ended."""
        if self._part.file is not None:
            self._part.file.close()

    def _on_part_begin(self) -> None:
        self._part = _Part()
        self._disposition = b""

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _on_header_end(self) -> None:
        if self._header_name.lower() == b"content-disposition":
            self._disposition = self._header_value
        self._header_name = self._header_value = b""

    def _on_headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        name = options.get(b"name", b"").decode("utf-8", "replace")
        if name not in _FILES and name not in _FIELDS:
            raise InvalidRequestError(
                f"{name[:80] or 'part'}: this part is not known; send name, adapter_config and "
                "adapter_model.",
                param=name[:80] or None,
            )
        if name in self.fields or name in self.hashes:
            raise InvalidRequestError(f"{name}: it was sent twice; send it once.", param=name)
        self._part.name = name
        if name in _FILES:
            self._check_file_name(name, options.get(b"filename"))
            self._part.limit = self._limits[name]
            self._part.file = (self._folder / _FILES[name]).open("xb")
            self._hash = hashlib.sha256()

    @staticmethod
    def _check_file_name(name: str, raw: bytes | None) -> None:
        if raw is None:
            return
        file_name = raw.decode("utf-8", "replace")
        try:
            check_file_name(file_name)
        except ArtifactError as error:
            raise AdapterRejectedError(error.field, error.message, error.remedy) from None
        if file_name != _FILES[name]:
            raise AdapterRejectedError(
                name, f"this part holds {file_name}.", f"Send {_FILES[name]} in it."
            )

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        part = self._part
        part.size += end - start
        if part.size > part.limit:
            raise BodyTooLargeError(
                f"{part.name}: more than the {part.limit} bytes allowed; use a smaller rank or "
                "fewer target modules.",
                param=part.name,
            )
        piece = data[start:end]
        if part.file is None:
            part.data += piece
        else:
            self._hash.update(piece)
            part.file.write(piece)

    def _on_part_end(self) -> None:
        part = self._part
        if part.file is not None:
            part.file.close()
            part.file = None
            self.hashes[part.name] = self._hash.hexdigest()
        else:
            self.fields[part.name] = part.data.decode("utf-8", "replace")

    def _on_end(self) -> None:
        self.is_complete = True


@asynccontextmanager
async def receive(
    request: Request, quarantine: Quarantine, *, max_model_bytes: int
) -> AsyncIterator[Upload]:
    """The upload in a folder of its own, which is gone when the block ends.

    Raises:
        InvalidRequestError: not the parts we know; AdapterRejectedError: a foreign file name.
        BodyTooLargeError: a part is over its cap.
        UnavailableError: too many uploads at once.
    """
    boundary = _boundary_of(request)
    async with quarantine.folder() as folder:
        receiver = _Receiver(boundary, folder, max_model_bytes)
        try:
            pending = bytearray()
            async for chunk in request.stream():
                pending += chunk
                if len(pending) >= _WRITE_BYTES:
                    await _write(receiver, bytes(pending))
                    pending.clear()
            await _write(receiver, bytes(pending))
            yield _check(receiver, folder)
        finally:
            receiver.close()


async def _write(receiver: _Receiver, data: bytes) -> None:
    try:
        await asyncio.to_thread(receiver.write, data)
    except FormParserError:
        raise InvalidRequestError(
            "The body is not well-formed multipart/form-data; send it with an HTTP library."
        ) from None


def _boundary_of(request: Request) -> bytes:
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not 1 <= len(boundary) <= 200:
        raise InvalidRequestError(
            "Send multipart/form-data with the parts name, adapter_config and adapter_model.",
            param="Content-Type",
        )
    return boundary


def _check(receiver: _Receiver, folder: Path) -> Upload:
    for name in ("name", "adapter_config", "adapter_model"):
        if name not in receiver.fields and name not in receiver.hashes:
            raise InvalidRequestError(
                f"{name}: this part is missing; add it to the form.", param=name
            )
    if not receiver.is_complete:
        raise InvalidRequestError("The body ends before its last part does; send it again.")
    name = receiver.fields["name"]
    if NAME_PATTERN.fullmatch(name) is None:
        raise InvalidRequestError(
            "name: use 1 to 80 letters, digits, '.', '_' or '-', beginning with a letter or digit.",
            param="name",
        )
    for hash_name in ("tokenizer_sha256", "chat_template_sha256"):
        value = receiver.fields.get(hash_name)
        if value is not None and _SHA256.fullmatch(value) is None:
            raise InvalidRequestError(
                f"{hash_name}: it must be 64 lower-case hex digits, or left out.", param=hash_name
            )
    is_probed = _BOOLEANS.get(receiver.fields.get("probe", "true"))
    if is_probed is None:
        raise InvalidRequestError("probe: it must be true or false, or left out.", param="probe")
    parts = sorted({**receiver.fields, **receiver.hashes}.items())
    return Upload(
        folder=folder,
        name=name,
        tokenizer_sha256=receiver.fields.get("tokenizer_sha256"),
        chat_template_sha256=receiver.fields.get("chat_template_sha256"),
        is_probed=is_probed,
        fingerprint=hashlib.sha256(repr(parts).encode()).digest(),
    )
