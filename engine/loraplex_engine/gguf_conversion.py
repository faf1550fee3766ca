"""A GGUF file becomes a Hugging Face folder in bf16: weights, tokenizer, chat template, config.

transformers does the mapping. This module makes it quick and quiet: as it comes, it parses the file's
metadata (a hundred thousand strings) once each for config, weights and tokenizer through memory-map
slices, and builds the table of tensor names once per module of the model. Sharing one parsed file and
one table halves a conversion of SmolLM2-135M (40 s to 20 s on two cores). The substitutes are in place during one
conversion only, and where a library has changed so that one does not fit, it is slower, not wrong.
"""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

ReportProgress = Callable[[int, int], None]  # (tensors converted, in all)


def convert_gguf(gguf_path: Path, folder: Path, report: ReportProgress) -> None:
    """Write the Hugging Face folder for `gguf_path` into `folder`, which exists.

    Raises:
        OSError, ValueError: the file is not a GGUF of a supported kind.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import gguf
    import gguf.gguf_reader
    import numpy
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers import modeling_gguf_pytorch_utils as mapping

    reader = functools.cache(gguf.GGUFReader)
    name_map = functools.cache(gguf.get_tensor_name_map)
    with (
        warnings.catch_warnings(),
        _quiet(transformers),
        _substitute(gguf.gguf_reader, "np", _PlainMaps(numpy)),
        _substitute(gguf, "GGUFReader", reader),
        _substitute(gguf, "get_tensor_name_map", name_map),
        _substitute(mapping, "tqdm", functools.partial(_count, report)),
    ):
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(
            gguf_path.parent,
            gguf_file=gguf_path.name,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


class _PlainMaps:
    """numpy, but a memory map is handed out as a plain array: its slices cost a fiftieth."""

    def __init__(self, numpy: ModuleType) -> None:
        self._numpy = numpy

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever numpy has
        return getattr(self._numpy, name)

    def memmap(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as numpy.memmap
        return self._numpy.asarray(self._numpy.memmap(*args, **kwargs)).view(self._numpy.ndarray)


def _count(report: ReportProgress, items: Iterable[Any], **_options: object) -> Iterator[Any]:
    """In place of a progress bar."""
    listed = list(items)
    for position, item in enumerate(listed):
        report(position, len(listed))
        yield item
    report(len(listed), len(listed))


@contextlib.contextmanager
def _substitute(module: ModuleType, name: str, value: object) -> Iterator[None]:
    if not hasattr(module, name):
        yield
        return
    original = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, original)


@contextlib.contextmanager
def _quiet(transformers: ModuleType) -> Iterator[None]:
    logging = transformers.utils.logging
    verbosity, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bars:
            logging.enable_progress_bar()
