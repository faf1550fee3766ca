"""The content-addressed store of adapters: one folder per digest, written once, never changed.

Layout: <url>/adapters/<first 2 hex>/<64 hex>/{adapter_config.json, adapter_model.safetensors}.
Works on any fsspec URL (file://, s3://, gs://, memory://). The digest in the name is the contract:
`load` reads, checks and compares it every time, so a damaged or replaced file is never served.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import time
import uuid
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from loraplex_engine.artifact.errors import AdapterNotStoredError, ArtifactError
from loraplex_engine.artifact.limits import AdapterLimits
from loraplex_engine.artifact.reader import (
    ADAPTER_FILES,
    CONFIG_FILE,
    TENSORS_FILE,
    AdapterArtifact,
    read_adapter,
)

_DIGEST = re.compile(r"sha256:(?P<hex>[0-9a-f]{64})")
_FOLDER: Final = "adapters"


class AdapterStore:
    """Put adapters in, get them out by digest. Safe to use from several threads and processes."""

    def __init__(self, url: str) -> None:
        """Open the store at `url`; nothing is created before the first `put`.

        Raises:
            ValueError: no scheme, or one fsspec does not know.
        """
        parts = urlsplit(url)
        if not parts.scheme:
            raise ValueError(
                f"{url!r} is not a URL: write file:///absolute/path or s3://bucket/path"
            )
        self.url = url.rstrip("/")
        self._local_root: Path | None = None
        self._remote: Any = None
        self._remote_root = ""
        if parts.scheme == "file":
            if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
                raise ValueError(f"{url!r} must look like file:///absolute/path")
            self._local_root = Path(unquote(parts.path)) / _FOLDER
        else:
            import fsspec

            self._remote, root = fsspec.core.url_to_fs(self.url)
            self._remote_root = f"{root.rstrip('/')}/{_FOLDER}"

    def has(self, digest: str) -> bool:
        """True if the adapter is published."""
        if self._local_root is not None:
            return self.folder_in(self._local_root, digest).is_dir()
        # The config is written last, so it stands for both files.
        return bool(self._remote.exists(f"{self._remote_folder(digest)}/{CONFIG_FILE}"))

    def put(self, folder: Path, digest: str) -> None:
        """Publish the two files of `folder` under `digest`; a no-op if it is there already.

        Readers see either nothing or the whole adapter. The caller has read and checked the folder.
        Either way it counts as put just now, for `idle`.
        """
        if self._local_root is not None:
            self._put_local(self._local_root, folder, digest)
        elif self.has(digest):
            target = self._remote_folder(digest)
            self._remote.put_file(str(folder / CONFIG_FILE), f"{target}/{CONFIG_FILE}")
        else:
            target = self._remote_folder(digest)
            self._remote.makedirs(target, exist_ok=True)
            for name in (TENSORS_FILE, CONFIG_FILE):
                self._remote.put_file(str(folder / name), f"{target}/{name}")

    def idle(self, age_s: float) -> list[str]:
        """Digests that nobody has put for `age_s` seconds.

        Raises:
            OSError: the store cannot be read.
        """
        found = []
        if self._local_root is not None:
            names = [path.name for path in self._local_root.glob("[0-9a-f][0-9a-f]/*")]
        else:
            files = self._remote.glob(f"{self._remote_root}/*/*/{CONFIG_FILE}")
            names = [str(file).rsplit("/", 2)[-2] for file in files]
        for name in names:
            digest = f"sha256:{name}"
            if _DIGEST.fullmatch(digest) and self._age_s(digest) >= age_s:
                found.append(digest)
        return found

    def delete(self, digest: str, *, age_s: float) -> bool:
        """Delete an adapter unless it was put within `age_s` seconds, which is looked at once more.

        Raises:
            OSError: the store cannot be written.
        """
        if self._age_s(digest) < age_s:
            return False
        if self._local_root is None:
            self._remote.rm(self._remote_folder(digest), recursive=True)
            return True
        folder = self.folder_in(self._local_root, digest)
        gone = folder.parent / f".partial-{uuid.uuid4().hex}"
        os.rename(folder, gone)  # in one step: nobody reads half of it
        shutil.rmtree(gone)
        return True

    def _age_s(self, digest: str) -> float:
        """Seconds since it was put; negative infinity if it is gone."""
        try:
            if self._local_root is not None:
                then = self.folder_in(self._local_root, digest).stat().st_mtime
            else:
                path = f"{self._remote_folder(digest)}/{CONFIG_FILE}"
                then = self._remote.modified(path).timestamp()
        except FileNotFoundError:
            return -math.inf
        return time.time() - float(then)

    def fetch(self, digest: str, into: Path) -> Path:
        """A local folder with the adapter's files, below `into` unless the store itself is local.

        Raises:
            AdapterNotStoredError: it is not published.
            OSError: the store cannot be read.
        """
        if self._local_root is not None:
            folder = self.folder_in(self._local_root, digest)
            if not folder.is_dir():
                raise AdapterNotStoredError(f"{digest} is not in the store")
            return folder
        folder = self.folder_in(into, digest)
        if folder.is_dir():
            return folder
        if not self.has(digest):
            raise AdapterNotStoredError(f"{digest} is not in the store")
        partial = _new_partial_folder(folder)
        try:
            for name in ADAPTER_FILES:
                self._remote.get_file(f"{self._remote_folder(digest)}/{name}", str(partial / name))
            _publish(partial, folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return folder

    def load(self, digest: str, into: Path, *, limits: AdapterLimits) -> AdapterArtifact:
        """Fetch, read and check the adapter, and compare its digest with its name.

        Raises:
            AdapterNotStoredError: it is not published.
            ArtifactError: it is damaged, or not what its name says.
            OSError: the store cannot be read.
        """
        folder = self.fetch(digest, into)
        try:
            try:
                artifact = read_adapter(folder, limits=limits)
            except FileNotFoundError:
                # Another process that shares the copies was short of room just now.
                artifact = read_adapter(self.fetch(digest, into), limits=limits)
            if artifact.digest != digest:
                raise ArtifactError(
                    "digest",
                    f"the stored adapter is {artifact.digest}, not {digest}.",
                    "Upload the adapter again.",
                )
        except ArtifactError:
            # A damaged copy must not outlive the attempt: the next one downloads it anew.
            if self._local_root is None:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        return artifact

    def _put_local(self, root: Path, folder: Path, digest: str) -> None:
        target = self.folder_in(root, digest)
        if target.is_dir():
            os.utime(target)
            return
        partial = _new_partial_folder(target)
        try:
            for name in ADAPTER_FILES:
                shutil.copyfile(folder / name, partial / name)
                _sync(partial / name)
            _sync(partial)
            _publish(partial, target)
            _sync(target.parent)
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    @property
    def is_local(self) -> bool:
        """Whether adapters are read where they lie, so that nothing is copied."""
        return self._local_root is not None

    @staticmethod
    def folder_in(root: Path, digest: str) -> Path:
        """Where an adapter lies below `root`, here and where copies are kept.

        Raises:
            AdapterNotStoredError: not a digest.
        """
        hexadecimal = _hex(digest)
        return root / hexadecimal[:2] / hexadecimal

    def _remote_folder(self, digest: str) -> str:
        hexadecimal = _hex(digest)
        return f"{self._remote_root}/{hexadecimal[:2]}/{hexadecimal}"


def _hex(digest: str) -> str:
    """The hex part; anything else could name another place.

    Raises:
        AdapterNotStoredError: not a digest.
    """
    match = _DIGEST.fullmatch(digest)
    if match is None:
        raise AdapterNotStoredError(f"{digest[:80]!r} is not an adapter digest")
    return match["hex"]


def _new_partial_folder(target: Path) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.parent / f".partial-{uuid.uuid4().hex}"
    partial.mkdir()
    return partial


def _publish(partial: Path, target: Path) -> None:
    """Rename in one step; another process that was first has published the same content."""
    try:
        os.rename(partial, target)
    except OSError:
        if not target.is_dir():
            raise


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
