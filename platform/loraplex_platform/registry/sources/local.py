"""A folder of the server: below an allowed root, and through no symbolic link, whoever changes it meanwhile."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from loraplex_engine.artifact import ADAPTER_FILES

from loraplex_platform.registry.errors import AdapterRejectedError
from loraplex_platform.registry.sources.base import (
    PIECE_BYTES,
    Listing,
    OnBytes,
    SourceUnavailableError,
    changed_meanwhile,
    check_names,
    check_sizes,
)

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class FolderSource:
    """See the module's header.

    Args:
        source: file:///allowed/parts.
        root: file:///allowed/, which may itself be behind links: it is the operator's word.
    """

    def __init__(self, source: str, root: str) -> None:
        self._source = source.rstrip("/")
        self._root = Path(root.removeprefix("file://"))
        self._parts = [part for part in self._source[len(root) :].split("/") if part]

    def look(self, max_model_bytes: int) -> Listing:
        """As `Source.look`."""
        with self._open_folder() as folder:
            check_names(set(os.listdir(folder)), self._source)
            sizes = {}
            for name in ADAPTER_FILES:
                status = os.stat(name, dir_fd=folder, follow_symlinks=False)
                if not stat.S_ISREG(status.st_mode):
                    raise AdapterRejectedError(
                        "source", f"{name} is not a regular file.", "Put the file itself there."
                    )
                sizes[name] = status.st_size
        check_sizes(sizes, max_model_bytes)
        return Listing(self._source, sizes)

    def read(self, listing: Listing, into: Path, on_bytes: OnBytes) -> None:
        """As `Source.read`."""
        with self._open_folder() as folder:
            for name, size_bytes in listing.sizes.items():
                flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                descriptor = os.open(name, flags, dir_fd=folder)
                with open(descriptor, "rb") as source, (into / name).open("xb") as target:
                    left = size_bytes
                    while piece := source.read(min(PIECE_BYTES, left + 1)):
                        left -= len(piece)
                        if left < 0:
                            break
                        target.write(piece)
                        on_bytes(len(piece))
                if left:
                    raise changed_meanwhile(name)

    @contextlib.contextmanager
    def _open_folder(self) -> Iterator[int]:
        """Part by part from the root, so that no link anywhere leads out of it."""
        opened: list[int] = []
        try:
            opened.append(os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
            for part in self._parts:
                opened.append(os.open(part, _FOLDER, dir_fd=opened[-1]))
            yield opened[-1]
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                raise AdapterRejectedError(
                    "source",
                    f"{self._source} is not a folder of this server.",
                    "Name one; a symbolic link is not followed.",
                ) from error
            if isinstance(error, PermissionError):
                raise AdapterRejectedError(
                    "source", "the server may not read it.", "Give the control process the right."
                ) from error
            raise SourceUnavailableError(
                f"source: {self._source} cannot be read ({error.strerror}).", retry_after_s=10
            ) from error
        finally:
            for descriptor in opened:
                os.close(descriptor)
