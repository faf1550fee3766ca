"""The file with which an operator declares prefixes that all tenants may share: `--public-prefix-file`.

A JSON list. Each entry is one prefix: a list of token ids, or a text, which is turned into ids with the
base model's own tokenizer.json (special tokens in the text are recognised, none is added). Whoever
declares a prefix says that it is no secret, and that nobody minds who learns that somebody used it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from loraplex_engine.errors import ConfigError

MAX_FILE_BYTES = 16 * 1024**2
_FLAG = "--public-prefix-file"

TokenIds = tuple[int, ...]


def load_public_prefixes(
    path: Path, *, model_dir: Path, vocab_size: int, block_size: int
) -> tuple[TokenIds, ...]:
    """Read and check the file.

    Raises:
        ConfigError: it cannot be read or is not as the header says; the message names the entry.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{_FLAG} {path}: more than {MAX_FILE_BYTES} bytes; shorten it")
        entries = msgspec.json.decode(path.read_bytes(), type=list[str | list[int]])
    except OSError as error:
        raise ConfigError(f"{_FLAG} {path}: cannot be read ({error})") from error
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"{_FLAG} {path}: not a JSON list of texts and lists of token ids ({error})"
        ) from error
    if not entries:
        raise ConfigError(f"{_FLAG} {path}: declares nothing; leave the flag out")
    encode = _open_tokenizer(path, model_dir) if any(isinstance(e, str) for e in entries) else None
    prefixes = []
    for index, entry in enumerate(entries):
        if isinstance(entry, str):
            assert encode is not None
            token_ids = encode(entry)
        else:
            token_ids = tuple(entry)
        bad = next((token for token in token_ids if not 0 <= token < vocab_size), None)
        if bad is not None:
            raise ConfigError(
                f"{_FLAG} {path}: entry {index} holds token id {bad}; ids of this model are 0 to"
                f" {vocab_size - 1}"
            )
        if len(token_ids) < block_size:
            raise ConfigError(
                f"{_FLAG} {path}: entry {index} has {len(token_ids)} tokens; only whole blocks of"
                f" {block_size} are shared, so give at least that many"
            )
        prefixes.append(token_ids)
    return tuple(prefixes)


def _open_tokenizer(path: Path, model_dir: Path) -> Callable[[str], TokenIds]:
    file = model_dir / "tokenizer.json"
    try:
        from tokenizers import Tokenizer  # no part of the engine otherwise: ids in, ids out
    except ImportError as error:
        raise ConfigError(
            f"{_FLAG} {path}: texts need the package tokenizers; install it or give token ids"
        ) from error
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(
            f"{_FLAG} {path}: texts need {file}, which cannot be read ({error}); give token ids"
        ) from error
    return lambda text: tuple(tokenizer.encode(text, add_special_tokens=False).ids)
