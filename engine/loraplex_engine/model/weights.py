"""Reads the tensors of a Hugging Face folder, one file or a sharded index, by name.

Every tensor of the folder must be asked for exactly once and every tensor asked for must be there:
a checkpoint that carries something this decoder does not compute is another model. Tensors are
memory-mapped, so the peak is one merged weight above what the model keeps.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from loraplex_engine.errors import ModelError

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Buffers that old exports stored although they follow from the configuration.
_DERIVED_SUFFIX = ".rotary_emb.inv_freq"


class WeightSource(Protocol):
    """Tensors by name: those of a folder, or made up for a benchmark."""

    def __contains__(self, name: str) -> bool: ...

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """See `WeightReader.take`."""
        ...

    def check_all_taken(self) -> None:
        """See `WeightReader.check_all_taken`."""
        ...


class WeightReader:
    """Hands out tensors by name and remembers which were taken."""

    def __init__(self, folder: Path, handles: dict[str, Any]) -> None:
        self._folder = folder
        self._handles = handles  # name -> open safetensors file that holds it
        self._unused = {name for name in handles if not name.endswith(_DERIVED_SUFFIX)}

    def __contains__(self, name: str) -> bool:
        return name in self._handles

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor called `name`, in the checkpoint's dtype.

        Raises:
            ModelError: it is missing, was taken before, or has another shape or dtype.
        """
        if name not in self._handles:
            raise ModelError(f"{self._folder}: tensor {name} is missing")
        if name not in self._unused:
            raise ModelError(f"{self._folder}: tensor {name} was read twice")
        self._unused.discard(name)
        try:
            tensor: Tensor = self._handles[name].get_tensor(name)
        except SafetensorError as error:
            raise ModelError(f"{self._folder}: tensor {name}: {error}") from error
        if tuple(tensor.shape) != shape:
            raise ModelError(
                f"{self._folder}: tensor {name} has shape {tuple(tensor.shape)}, "
                f"config.json says {shape}"
            )
        if tensor.dtype not in _FLOAT_DTYPES:
            raise ModelError(f"{self._folder}: tensor {name} has dtype {tensor.dtype}")
        return tensor

    def check_all_taken(self) -> None:
        """Raise `ModelError` if the folder holds tensors that nothing asked for."""
        if self._unused:
            names = sorted(self._unused)
            raise ModelError(
                f"{self._folder}: {len(names)} tensors have no place in this model, "
                f"for example {', '.join(names[:3])}"
            )


@contextmanager
def open_weights(folder: Path) -> Iterator[WeightReader]:
    """Open the folder's safetensors files.

    Raises:
        ModelError: there are none, or the files and the index disagree.
    """
    names_by_file = _list_files(folder)
    handles: dict[str, Any] = {}
    with ExitStack() as stack:
        for file_name, promised in names_by_file.items():
            path = folder / file_name
            try:
                # The stub of safe_open is not a context manager type.
                handle = stack.enter_context(safe_open(path, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise ModelError(f"{path} could not be read: {error}") from error
            found = set(handle.keys())
            if promised is not None and found != promised:
                odd = sorted(found ^ promised)
                raise ModelError(f"{path}: {_INDEX} does not match the file, see {odd[0]}")
            handles.update(dict.fromkeys(found, handle))
        yield WeightReader(folder, handles)


def _list_files(folder: Path) -> dict[str, set[str] | None]:
    """File name -> tensor names the index promises there; None without an index."""
    index_path = folder / _INDEX
    if not index_path.exists():
        if not (folder / _SINGLE).exists():
            raise ModelError(f"{folder} holds neither {_SINGLE} nor {_INDEX}")
        return {_SINGLE: None}
    try:
        weight_map = json.loads(index_path.read_text(encoding="utf-8"))["weight_map"]
        pairs = [(str(name), str(file_name)) for name, file_name in weight_map.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index_path} is malformed: {error!r}") from error
    files: dict[str, set[str] | None] = {}
    for name, file_name in pairs:
        if Path(file_name).name != file_name:
            raise ModelError(f"{index_path}: {file_name!r} is not a plain file name")
        promised = files.setdefault(file_name, set())
        assert promised is not None
        promised.add(name)
    return files
