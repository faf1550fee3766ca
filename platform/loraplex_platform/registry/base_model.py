"""What a base model's folder is, exactly: digests of its files and the shape of the decoder."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loraplex_engine.artifact import identify_model, identity_files

_SHAPE_FIELDS = (
    "architectures",
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "rope_theta",
    "rope_scaling",
    "rms_norm_eps",
    "tie_word_embeddings",
    "hidden_act",
)


class BaseModelError(ValueError):
    """The model folder cannot be registered; the message names the file and the remedy."""


@dataclass(frozen=True, slots=True)
class BaseModelFacts:
    """Two folders with equal facts serve the same tokens. Digests are hex sha256."""

    name: str
    revision: str  # "sha256:<64 hex>" over the names and digests of the weight files
    tokenizer_sha256: str
    chat_template_sha256: str
    license: str | None
    architecture: dict[str, Any]


def read_base_model(folder: Path, name: str) -> BaseModelFacts:
    """Hash the folder's files; takes a second per few hundred MB of weights.

    Raises:
        BaseModelError: no weights, no config or no tokenizer.
    """
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise BaseModelError(
            f"{folder}: no *.safetensors in it. Run `loraplex models pull {name}`, or set "
            "LORAPLEX_MODEL_DIR to a Hugging Face folder."
        )
    paths = [*identity_files(folder), folder / "tokenizer.json"]
    try:
        identity = identify_model(
            folder, {path.name: _sha256(path) for path in dict.fromkeys(paths)}
        )
    except OSError as error:
        raise BaseModelError(
            f"{folder}/tokenizer_config.json: cannot be read ({error.strerror})."
        ) from error
    except ValueError as error:
        raise BaseModelError(
            f"{folder}/tokenizer_config.json: not a JSON object ({error})."
        ) from error
    config = _read_json(folder / "config.json")
    return BaseModelFacts(
        name=name,
        revision=identity.revision,
        tokenizer_sha256=identity.tokenizer_sha256,
        chat_template_sha256=identity.chat_template_sha256,
        license=config.get("license") if isinstance(config.get("license"), str) else None,
        architecture={field: config[field] for field in _SHAPE_FIELDS if field in config},
    )


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise BaseModelError(f"{path}: cannot be read ({error.strerror}).") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BaseModelError(f"{path}: cannot be read ({error.strerror}).") from error
    except ValueError as error:
        raise BaseModelError(f"{path}: not JSON ({error}).") from error
    if not isinstance(document, dict):
        raise BaseModelError(f"{path}: not a JSON object.")
    return document
