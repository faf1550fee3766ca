"""A folder of an s3:// or gs:// bucket, read through fsspec with the server's own credentials."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from loraplex_engine.artifact import (
    ADAPTER_FILES,
    TENSORS_FILE,
    StoreUnavailableError,
    open_remote,
    telling_unavailable,
)

from loraplex_platform.errors import InvalidRequestError
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


class BucketSource:
    """See the module's header."""

    def __init__(self, source: str) -> None:
        """Nothing is asked yet.

        Raises:
            InvalidRequestError: this server lacks the package for it.
        """
        self._source = source.rstrip("/")
        try:
            self._remote, self._path = open_remote(self._source)
        except ValueError as error:
            raise InvalidRequestError(f"source: {error}.", param="source") from error

    def look(self, max_model_bytes: int) -> Listing:
        """As `Source.look`."""
        try:
            with telling_unavailable(f"{self._source} cannot be read"):
                entries: list[dict[str, Any]] = self._remote.ls(self._path, detail=True)
        except FileNotFoundError:
            entries = []
        except StoreUnavailableError as error:
            raise SourceUnavailableError(f"source: {error}.", retry_after_s=10) from error
        sizes = {
            str(entry["name"]).rsplit("/", 1)[-1]: int(entry["size"] or 0)
            for entry in entries
            if entry["type"] == "file"
        }
        check_names(set(sizes), self._source)
        sizes = {name: sizes[name] for name in ADAPTER_FILES}
        check_sizes(sizes, max_model_bytes)
        return Listing(self._source, sizes)

    def read(self, listing: Listing, into: Path, on_bytes: OnBytes) -> None:
        """As `Source.read`."""
        for name, size_bytes in listing.sizes.items():
            left = size_bytes
            try:
                with (into / name).open("xb") as target:
                    while left > 0:
                        begin = size_bytes - left
                        end = min(begin + 8 * PIECE_BYTES, size_bytes)
                        with telling_unavailable(f"{self._source} cannot be read"):
                            path = f"{self._path}/{name}"
                            piece = self._remote.cat_file(path, start=begin, end=end)
                        if len(piece) != end - begin:
                            raise changed_meanwhile(name)
                        target.write(piece)
                        left -= len(piece)
                        on_bytes(len(piece))
            except FileNotFoundError:
                raise changed_meanwhile(name) from None
            except StoreUnavailableError as error:
                raise SourceUnavailableError(f"source: {error}.", retry_after_s=10) from error
        # Another one may have been put in its place between two pieces.
        try:
            now = self.look(max(listing.sizes.values()) + 1)
        except AdapterRejectedError:
            raise changed_meanwhile(TENSORS_FILE) from None
        if now.sizes != listing.sizes:
            raise changed_meanwhile(TENSORS_FILE)
