"""The content-addressed store of adapters: one folder per digest, written once, never changed.

Layout: <url>/adapters/<first 2 hex>/<64 hex>/{adapter_config.json, adapter_model.safetensors}.
Works on file://, and through fsspec on s3://, gs:// and memory://. The digest in the name is the contract:
`load` reads, checks and compares it every time, so a damaged or replaced file is never served.

`put` does the same work whether somebody has put that digest before or not: neither an answer nor the time
that it takes tells one tenant what another one has. What is written replaces what lies there, which mends a
store whose files were damaged.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import SplitResult, unquote, urlsplit

from loraplex_engine.artifact.errors import (
    AdapterNotStoredError,
    ArtifactError,
    StoreUnavailableError,
)
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
# A put that meets the deletion of an orphan of the same digest begins anew; twice is unheard of.
_PUT_TRIES: Final = 5

# scheme -> (package, extra of ours that brings it, how its fsspec class is opened)
_REMOTES: Final[dict[str, tuple[str, str | None, dict[str, Any]]]] = {
    "s3": (
        "s3fs",
        "s3",
        {
            # A listing that is remembered would hide what another process has put.
            "use_listings_cache": False,
            # Nor is a client shared with whoever opened one under other credentials.
            "skip_instance_cache": True,
            # What is away is told within seconds: botocore alone would wait for minutes.
            "config_kwargs": {
                "connect_timeout": 5,
                "read_timeout": 30,
                "retries": {"mode": "standard", "max_attempts": 3},
            },
        },
    ),
    "gs": ("gcsfs", "gcs", {"use_listings_cache": False, "skip_instance_cache": True}),
    "memory": ("fsspec", None, {}),
}


def without_login(url: str) -> str:
    """A URL as it may be printed: what could be a login or an option is left out."""
    scheme, mark, rest = url.rpartition("://")
    login, at, beyond = rest.rpartition("@")
    if any(sign in login for sign in "?#"):
        return f"{scheme}{mark}***"
    beyond = re.split(r"[?#]", beyond, maxsplit=1)[0] + ("?***" if "?" in beyond else "")
    # What should be a port may be a password whose end is missing.
    beyond = re.sub(r"^([^/:\[]*):(?!\d+(?:/|$))[^/]+", r"\1:***", beyond)
    return f"{scheme}{mark}{'***@' if at else ''}{beyond}"


def _parts(url: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError:  # it quotes what it cannot read
        raise ValueError(
            f"{without_login(url)!r} is not a URL: write file:///absolute/path or s3://bucket/path"
        ) from None


def open_remote(url: str) -> tuple[Any, str]:
    """The fsspec file system of an s3://, gs:// or memory:// URL, and the path in it.

    Credentials and endpoints come from where the cloud's own tools look (for s3: AWS_ACCESS_KEY_ID,
    AWS_ENDPOINT_URL, ~/.aws, the instance's role).

    Raises:
        ValueError: no such scheme, a part that a URL of it does not have, or its package is not there.
    """
    parts = _parts(url)
    if parts.scheme not in _REMOTES:
        raise ValueError(f"{parts.scheme}:// is not a store: use file://, s3:// or gs://")
    package, extra, options = _REMOTES[parts.scheme]
    if parts.query or parts.fragment or parts.username or parts.password:
        raise ValueError(
            f"a {parts.scheme}:// URL is a bucket and a path: options and credentials come from the environment"
        )
    if ":" in parts.netloc and not parts.netloc.startswith("arn:"):
        raise ValueError(
            f"a {parts.scheme}:// URL is a bucket and a path, and no bucket's name has a colon"
        )
    if not parts.netloc:
        raise ValueError(f"the URL names no bucket: write {parts.scheme}://bucket/path")
    import fsspec

    try:
        remote, path = fsspec.core.url_to_fs(url, **options)
    except ImportError:
        raise ValueError(
            f"{parts.scheme}:// needs the package {package}: pip install 'loraplex[{extra}]'"
        ) from None
    return remote, str(path).rstrip("/")


@contextlib.contextmanager
def telling_unavailable(what: str) -> Iterator[None]:
    """Whatever a cloud's client throws as one `OSError`; a file that is not there stays that.

    Raises:
        StoreUnavailableError: anything but `FileNotFoundError` and trouble with our own disk.
    """
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        if isinstance(error, StoreUnavailableError) or error.filename is not None:
            raise
        raise StoreUnavailableError(f"{what}: {_one_line(error)}") from error
    except Exception as error:  # clients have error trees of their own, whose roots are no OSError
        raise StoreUnavailableError(f"{what}: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:300]}".replace("\n", " ")


class AdapterStore:
    """Put adapters in, get them out by digest. Safe to use from several threads and processes."""

    def __init__(self, url: str) -> None:
        """Open the store at `url`; nothing is created before the first `put`.

        Raises:
            ValueError: no scheme, or one fsspec does not know.
        """
        parts = _parts(url)
        if not parts.scheme:
            raise ValueError(
                f"{without_login(url)!r} is not a URL: write file:///absolute/path or s3://bucket/path"
            )
        self.url = url.rstrip("/")
        self._local_root: Path | None = None
        self._remote: Any = None
        self._remote_root = ""
        if parts.scheme == "file":
            if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
                raise ValueError(f"{without_login(url)!r} must look like file:///absolute/path")
            self._local_root = Path(unquote(parts.path)) / _FOLDER
        else:
            self._remote, root = open_remote(self.url)
            self._remote_root = f"{root}/{_FOLDER}"

    def check(self) -> None:
        """See whether the store can be reached: one cheap look, and where it is a folder, one small write.

        Raises:
            OSError: it cannot.
        """
        if self._local_root is not None:
            self._local_root.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._local_root) as probe:
                probe.write(b"x")
            return
        with telling_unavailable(f"{self.url} cannot be reached"):
            # One key that is never there: asks the service, the bucket and the credentials.
            self._remote.exists(f"{self._remote_root}/.reachable")
            bucket = self._remote_root.split("/", 1)[0]
            if not self._is_in_memory and not self._remote.exists(bucket):
                raise StoreUnavailableError(f"{self.url}: there is no bucket {bucket}")

    def has(self, digest: str) -> bool:
        """True if the adapter is published.

        Raises:
            OSError: the store cannot be read.
        """
        if self._local_root is not None:
            return self.folder_in(self._local_root, digest).is_dir()
        folder = self._remote_folder(digest)
        with telling_unavailable(f"{self.url} cannot be read"):
            # The config is written last, so it stands for both files.
            return bool(self._remote.exists(f"{folder}/{CONFIG_FILE}"))

    def put(self, folder: Path, digest: str) -> None:
        """Publish the two files of `folder` under `digest`, in place of what is there.

        Readers see either nothing or a whole adapter: whatever has one digest computes the same, so that a
        reader may also meet one file of each. The caller has read and checked the folder. It counts as put
        just now, for `idle`.

        Raises:
            OSError: the store cannot be written.
        """
        for _ in range(_PUT_TRIES):
            if self._local_root is not None:
                is_there = self._put_local(self._local_root, folder, digest)
            else:
                with telling_unavailable(f"{self.url} cannot be written"):
                    is_there = self._put_remote(folder, digest)
            if is_there:
                return
        raise StoreUnavailableError(f"{self.url}: {digest} is deleted as often as it is put")

    def _put_remote(self, folder: Path, digest: str) -> bool:
        """Whether it is still there: somebody may have been deleting an orphan of this digest."""
        target = self._remote_folder(digest)
        if self.has(digest):
            # Young from here on: a deletion that has not begun does not begin any more.
            self._remote.put_file(str(folder / CONFIG_FILE), f"{target}/{CONFIG_FILE}")
        if self._is_in_memory:  # a bucket has no folders, and asking for one may make the bucket
            self._remote.makedirs(target, exist_ok=True)
        for name in (TENSORS_FILE, CONFIG_FILE):
            self._remote.put_file(str(folder / name), f"{target}/{name}")
        return all(self._remote.exists(f"{target}/{name}") for name in ADAPTER_FILES)

    def idle(self, age_s: float) -> list[str]:
        """Digests that nobody has put for `age_s` seconds.

        Raises:
            OSError: the store cannot be read.
        """
        found = []
        if self._local_root is not None:
            names = [path.name for path in self._local_root.glob("[0-9a-f][0-9a-f]/*")]
        else:
            with telling_unavailable(f"{self.url} cannot be read"):
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
            with telling_unavailable(f"{self.url} cannot be written"):
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
                with telling_unavailable(f"{self.url} cannot be read"):
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
            with telling_unavailable(f"{self.url} cannot be read"):
                for name in ADAPTER_FILES:
                    path = f"{self._remote_folder(digest)}/{name}"
                    self._remote.get_file(path, str(partial / name))
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

    def _put_local(self, root: Path, folder: Path, digest: str) -> bool:
        """Whether it is there now: somebody may have been deleting an orphan of this digest."""
        target = self.folder_in(root, digest)
        partial = _new_partial_folder(target)
        try:
            for name in ADAPTER_FILES:
                shutil.copyfile(folder / name, partial / name)
                _sync(partial / name)
            _sync(partial)
            if not target.is_dir():
                _publish(partial, target)
            if partial.exists():  # the folder was there: its files change one by one
                try:
                    for name in ADAPTER_FILES:
                        os.replace(partial / name, target / name)
                    _sync(target)
                except FileNotFoundError:
                    return False
            _sync(target.parent)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return True

    @property
    def _is_in_memory(self) -> bool:
        return self.url.startswith("memory:")

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
