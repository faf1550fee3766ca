"""What the files of a base model's folder are, as three digests: engine and platform name a base by them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_TOKENIZER = "tokenizer.json"
_TEMPLATE = "chat_template.jinja"
_TOKENIZER_CONFIG = "tokenizer_config.json"


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """Two folders of one identity give the same tokens the same meaning, and compute with the same weights."""

    revision: str  # "sha256:<64 hex>" over the names and digests of the weight files
    tokenizer_sha256: str  # hex
    chat_template_sha256: str  # hex


UNKNOWN_MODEL = ModelIdentity("", "", "")


def identity_files(folder: Path) -> list[Path]:
    """The files whose digests `identify_model` needs; weights first, and none if there are none."""
    return [
        *sorted(folder.glob("*.safetensors")),
        *(folder / name for name in (_TOKENIZER, _TEMPLATE) if (folder / name).exists()),
    ]


def identify_model(folder: Path, sha256_of: Mapping[str, str]) -> ModelIdentity:
    """The identity from digests that are known already: weights are gigabytes, and read once.

    Args:
        folder: for the chat template that has no file of its own.
        sha256_of: file name -> hex digest, of at least `identity_files`.

    Raises:
        KeyError: there is no tokenizer.json.
        OSError: tokenizer_config.json cannot be read.
        ValueError: it is not a JSON object.
    """
    weights = sorted(name for name in sha256_of if name.endswith(".safetensors"))
    manifest = "".join(f"{name}\0{sha256_of[name]}\n" for name in weights)
    return ModelIdentity(
        revision="sha256:" + hashlib.sha256(manifest.encode()).hexdigest(),
        tokenizer_sha256=sha256_of[_TOKENIZER],
        chat_template_sha256=sha256_of.get(_TEMPLATE) or _embedded_template_sha256(folder),
    )


def _embedded_template_sha256(folder: Path) -> str:
    config = json.loads((folder / _TOKENIZER_CONFIG).read_text(encoding="utf-8"))
    if not isinstance(config, dict):
        raise ValueError(f"{_TOKENIZER_CONFIG} is not a JSON object")
    template = config.get("chat_template") or ""
    text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
