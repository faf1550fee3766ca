"""The base model's folder: a path as it is, a name from the cache, pulled there when it is missing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from loraplex_platform.local.errors import SettingError
from loraplex_platform.local.process import GUARD


@dataclass(frozen=True, slots=True)
class BaseModel:
    """A Hugging Face folder and the public name that clients use for it."""

    name: str
    folder: Path


def cache_dir() -> Path:
    """LORAPLEX_CACHE_DIR, or ~/.cache/loraplex."""
    return Path(os.environ.get("LORAPLEX_CACHE_DIR") or "~/.cache/loraplex").expanduser()


def find_base_model(model: str) -> BaseModel:
    """Resolve `--model`; pulls it (with a progress bar on the terminal) if the cache lacks it.

    Raises:
        SettingError: the folder is no model, or the pull failed (it has said why on the terminal).
    """
    as_path = Path(model).expanduser()
    if as_path.is_dir():
        folder = as_path.resolve()
        if not _is_model(folder):
            raise SettingError(
                f"{folder} is not a Hugging Face model folder (it lacks config.json or tokenizer.json)"
            )
        return BaseModel(folder.name, folder)
    if model.startswith((".", "/", "~")):
        raise SettingError(f"--model {model}: there is no such folder")
    name = model.rsplit("/", 1)[-1]
    folder = cache_dir() / "models" / name
    if not _is_model(folder):
        _pull(model)
    if not _is_model(folder):
        raise SettingError(f"`loraplex models pull {model}` left no model in {folder}")
    return BaseModel(name, folder)


def _is_model(folder: Path) -> bool:
    return (folder / "config.json").is_file() and (folder / "tokenizer.json").is_file()


def _pull(model: str) -> None:
    convert = [sys.executable, "-m", "loraplex_engine.convert", "pull", model]
    guarded = [
        *(sys.executable, "-I", "-S", str(GUARD), str(os.getpid()), str(int(signal.SIGTERM)), "--"),
        *convert,
    ]
    if subprocess.run(guarded, check=False).returncode != 0:
        raise SettingError(f"the model {model} could not be pulled: see above")
