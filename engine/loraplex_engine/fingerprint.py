"""What makes two replicas serve the same model, as one digest.

sha256 over: the digests of weights, tokenizer, chat template, model config and sampling defaults, the
dtype, what weights are quantized to, what keys and values are kept in, the engine's version and the image it
runs in. Routers and pins compare it.

Which CPU or GPU computes, and with which backends, is not in it: their last bits may differ. A replica's record and the
names of its blocks (kv/hashing.py) tell those apart.

Hashing a model's weights takes a second per few hundred megabytes, so the digest of each file is kept
beside the model, in `.loraplex-digests.json`, and believed while size and modification time are the
same. A folder that cannot be written costs only that second again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
import structlog

from loraplex_engine.artifact import UNKNOWN_MODEL, ModelIdentity, identify_model
from loraplex_engine.config import KvCacheDType, Quantization
from loraplex_engine.errors import ModelError

log = structlog.get_logger(__name__)

CACHE_NAME = ".loraplex-digests.json"
_CHUNK_BYTES = 4 * 1024**2
_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors.index.json",
)


class _KnownDigest(msgspec.Struct, frozen=True):
    size_bytes: int
    mtime_ns: int
    sha256: str


def hash_model(model_dir: Path) -> dict[str, str]:
    """File name -> sha256 hex of what makes the model, through the cache.

    Raises:
        ModelError: the folder has no safetensors weights or cannot be read.
    """
    weights = sorted(model_dir.glob("*.safetensors"))
    if not weights:
        raise ModelError(f"{model_dir}: no *.safetensors file; give a Hugging Face model folder")
    paths = [*weights, *(model_dir / name for name in _FILES if (model_dir / name).is_file())]
    return hash_files(model_dir, paths)


def identify_base(model_dir: Path, digests: Mapping[str, str]) -> ModelIdentity:
    """What the platform calls these weights, tokenizer and template, from `hash_model`'s digests.

    An engine needs no tokenizer: a folder without one has no identity, which is three empty strings.
    """
    try:
        return identify_model(model_dir, digests)
    except (KeyError, OSError, ValueError) as error:
        log.warning("base_not_identified", model_dir=str(model_dir), reason=str(error))
        return UNKNOWN_MODEL


def fingerprint_model(
    digests: Mapping[str, str],
    *,
    dtype: str,
    quantization: Quantization = "none",
    kv_cache_dtype: KvCacheDType = "auto",
    image: str = "",
) -> str:
    """`sha256:<64 hex>` for a folder in this dtype and engine version.

    Args:
        digests: what `hash_model` says of the folder.
        quantization: of the linears' weights.
        kv_cache_dtype: what is read from a quantized cache is not what was computed.
        image: digest of the container image.
    """
    parts = {
        "files": dict(digests),
        "dtype": dtype,
        "quantization": quantization,
        "kv_cache": kv_cache_dtype,
        "engine": engine_version(),
        "image": image,
    }
    canonical = json.dumps(parts, sort_keys=True, separators=(",", ":")).encode()
    return "sha256:" + hashlib.sha256(canonical).hexdigest()


def engine_version() -> str:
    """The installed distribution's version."""
    try:
        return version("loraplex")
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "0+source"


def hash_files(folder: Path, paths: list[Path]) -> dict[str, str]:
    """File name -> sha256 hex, through the cache. Raises `ModelError` when a file is unreadable."""
    cache_path = folder / CACHE_NAME
    known = _read_cache(cache_path)
    current: dict[str, _KnownDigest] = {}
    try:
        for path in paths:
            stat = path.stat()
            digest = known.get(path.name)
            if digest is None or (digest.size_bytes, digest.mtime_ns) != (
                stat.st_size,
                stat.st_mtime_ns,
            ):
                digest = _KnownDigest(stat.st_size, stat.st_mtime_ns, _sha256(path))
            current[path.name] = digest
    except OSError as error:
        raise ModelError(f"cannot read the model: {error}") from error
    if current != known:
        _write_cache(cache_path, current)
    return {name: digest.sha256 for name, digest in current.items()}


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _read_cache(path: Path) -> dict[str, _KnownDigest]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, _KnownDigest])
    except (OSError, msgspec.MsgspecError):
        return {}


def _write_cache(path: Path, digests: dict[str, _KnownDigest]) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(msgspec.json.encode(digests))
        temporary.replace(path)
    except OSError as error:
        log.info("digest_cache_not_kept", error=str(error))
