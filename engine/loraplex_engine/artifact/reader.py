"""Read a PEFT LoRA folder into a checked, digested `AdapterArtifact`.

The digest is the adapter's only identity: sha256 of a canonical manifest of every config field that
changes the result and each tensor's name, dtype, shape and sha256. A changed alpha is another
adapter, a changed comment in the config or order of tensors in the file is not.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, NoReturn

import msgspec
import numpy as np

from loraplex_engine.artifact.base_copy import BASE_COPIES
from loraplex_engine.artifact.config import (
    EMBED_TOKENS,
    LM_HEAD,
    AdapterConfig,
    parse_adapter_config,
)
from loraplex_engine.artifact.errors import ArtifactError
from loraplex_engine.artifact.limits import AdapterLimits, PatternClock
from loraplex_engine.artifact.tensors import SAVE_AGAIN, TensorView, read_tensors

CONFIG_FILE: Final = "adapter_config.json"
TENSORS_FILE: Final = "adapter_model.safetensors"
ADAPTER_FILES: Final = (CONFIG_FILE, TENSORS_FILE)

MANIFEST_FORMAT: Final = "loraplex-adapter-1"

_TENSOR_NAME = re.compile(
    r"base_model\.model\.(?:"
    r"model\.layers\.(?P<layer>0|[1-9][0-9]{0,4})\."
    r"(?P<linear>self_attn\.(?:q|k|v|o)_proj|mlp\.(?:gate|up|down)_proj)\.lora_(?P<half>[AB])\.weight"
    r"|lm_head\.lora_(?P<head_half>[AB])\.weight"
    r"|model\.embed_tokens\.lora_embedding_(?P<embedding_half>[AB])"
    r")"
)
_NAME_EXAMPLE = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"

# Parts of tensor names that PEFT gives features not served, most telling first.
_FOREIGN_NAMES: Final[tuple[tuple[str, str, str], ...]] = (
    ("lora_magnitude_vector", "DoRA is not served.", "Train with use_dora=false."),
    (
        "modules_to_save",
        "it replaces a module of the base, which all tenants share.",
        "Train without modules_to_save.",
    ),
    ("token_adapter", "trained token embeddings are not served.", "Train without new tokens."),
    (
        ".base_layer.",
        "it is a weight of the base, which all tenants share.",
        "Save with save_pretrained, which leaves the base's weights out.",
    ),
    (
        "embed_tokens",
        "it replaces the base's embeddings, which all tenants share.",
        "Train without new tokens, and save with save_pretrained(folder, save_embedding_layers=False).",
    ),
    (
        "lm_head",
        "it replaces the base's output head, which all tenants share.",
        "Train without new tokens, and save with save_pretrained(folder, save_embedding_layers=False).",
    ),
    (".bias", "biases are not served.", 'Train with bias="none" and lora_bias=false.'),
)


class ModuleName(NamedTuple):
    """A module of the base: layer index and its name inside the layer, "self_attn.q_proj".

    The two outside of all layers are `EMBEDDING` and `HEAD`.
    """

    layer: int
    linear: str

    def __str__(self) -> str:
        if self.layer == OUTSIDE:
            return self.linear
        return f"model.layers.{self.layer}.{self.linear}"


OUTSIDE: Final = -1
EMBEDDING: Final = ModuleName(OUTSIDE, EMBED_TOKENS)
HEAD: Final = ModuleName(OUTSIDE, LM_HEAD)


@dataclass(frozen=True, slots=True)
class LoraPair:
    """One module's delta: scale * B A, with A (rank, inputs) and B (outputs, rank).

    An embedding's inputs are its token ids.
    """

    a: TensorView
    b: TensorView
    rank: int
    scale: float


class Norms(msgspec.Struct, frozen=True, kw_only=True):
    """Frobenius norms of scale * B A over the modules; NaN where no bound asked for them."""

    max: float
    mean: float


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """A check that held, for the upload report."""

    name: str
    detail: str


@dataclass(frozen=True, slots=True)
class AdapterArtifact:
    """A checked adapter, whole in memory; independent of the folder it came from."""

    config: AdapterConfig
    tensors: Mapping[str, TensorView]  # without `base_copies`
    base_copies: Mapping[str, TensorView]  # which say nothing, if they are that: see `base_copy.py`
    pairs: Mapping[ModuleName, LoraPair]  # in layer order, those outside of layers first
    digest: str  # "sha256:<64 hex>"
    rank_max: int
    target_modules: tuple[str, ...]  # last names, for example ("down_proj", "q_proj")
    num_parameters: int
    size_bytes: int  # of the two files
    norms: Norms
    checks: tuple[Check, ...]


def check_file_name(name: str) -> None:
    """Accept only the two names an adapter consists of; call it on every name a client sends.

    Raises:
        ArtifactError: any other name, and any path.
    """
    if name in ADAPTER_FILES:
        return
    shown = name[:80]
    if "/" in name or "\\" in name or ".." in name or "\0" in name:
        raise ArtifactError(
            "filename", f"{shown!r} is a path.", "Send plain file names; folders are not kept."
        )
    raise ArtifactError(
        "filename",
        f"{shown!r} is not part of an adapter.",
        f"Send exactly {CONFIG_FILE} and {TENSORS_FILE}; pickle files (.bin, .pt) are never opened.",
    )


def read_adapter(folder: Path, *, limits: AdapterLimits) -> AdapterArtifact:
    """Read and check an adapter folder; everything but its fit to a base (`check_fits`).

    Reads each file once into memory and checks, digests and returns those bytes, so that a file
    changed meanwhile cannot pass with another's digest.

    Raises:
        ArtifactError: the folder is not a well-formed adapter.
        OSError: a file could not be read.
    """
    _check_folder(folder)
    config_bytes = _read_file(folder / CONFIG_FILE, limits.max_config_bytes)
    model_bytes = _read_file(folder / TENSORS_FILE, limits.max_model_bytes)
    config = parse_adapter_config(bytes(config_bytes), limits=limits)
    all_tensors = read_tensors(model_bytes, limits=limits)
    base_copies = {name: all_tensors[name] for name in BASE_COPIES if name in all_tensors}
    tensors = {name: view for name, view in all_tensors.items() if name not in base_copies}
    if not tensors:
        raise ArtifactError("adapter_model", "it holds no LoRA tensors.", SAVE_AGAIN)
    pairs = _pair_up(config, tensors, limits)
    norms = _check_values(pairs, limits)
    num_parameters = sum(math.prod(tensor.shape) for tensor in tensors.values())
    rank_max = max(pair.rank for pair in pairs.values())
    return AdapterArtifact(
        config=config,
        tensors=tensors,
        base_copies=base_copies,
        pairs=pairs,
        digest=_digest(config, tensors),
        rank_max=rank_max,
        target_modules=tuple(sorted({module.linear.rsplit(".", 1)[-1] for module in pairs})),
        num_parameters=num_parameters,
        size_bytes=len(config_bytes) + len(model_bytes),
        norms=norms,
        checks=(
            Check(name="files", detail=f"{CONFIG_FILE} and {TENSORS_FILE}, no pickle"),
            Check(name="config", detail="plain LoRA, every field understood"),
            Check(
                name="header", detail=f"{len(all_tensors)} tensors, ranges cover the file exactly"
            ),
            Check(name="pairs", detail=f"{len(pairs)} complete A/B pairs, none unused"),
            Check(name="rank", detail=f"largest {rank_max}, cap {limits.max_rank}"),
            Check(name="finite", detail=f"{num_parameters} values, no NaN or Inf"),
            Check(name="effect", detail=f"largest module norm {norms.max:.4g}"),
        ),
    )


def _check_folder(folder: Path) -> None:
    try:
        names = sorted(os.listdir(folder))
    except NotADirectoryError:
        raise ArtifactError(
            "folder", "it is not a folder.", "An adapter is a folder of two files."
        ) from None
    for name in ADAPTER_FILES:
        if name not in names:
            raise ArtifactError(
                name, "the file is missing.", "PEFT's save_pretrained writes both files."
            )
    for name in names:
        check_file_name(name)


def _read_file(path: Path, max_bytes: int) -> memoryview:
    """The whole file; never through a symbolic link, never a device or pipe."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if path.is_symlink():
            raise ArtifactError(
                path.name, "it is a symbolic link.", "Upload the file itself."
            ) from error
        raise
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ArtifactError(path.name, "it is not a regular file.", "Upload a file.")
        if status.st_size > max_bytes:
            raise ArtifactError(
                path.name,
                f"it has {status.st_size} bytes; {max_bytes} are allowed.",
                "Save it in bfloat16, or train with a smaller rank.",
            )
        # A mapping of its own rather than the heap: it goes back to the system when it is dropped.
        content = memoryview(mmap.mmap(-1, max(status.st_size, 1)))[: status.st_size]
        if file.readinto(content) != status.st_size or file.read(1):
            raise ArtifactError(
                path.name, "its size changed while it was read.", "Upload a finished file."
            )
    return content.toreadonly()


def _pair_up(
    config: AdapterConfig, tensors: Mapping[str, TensorView], limits: AdapterLimits
) -> dict[ModuleName, LoraPair]:
    """Match tensors to modules: every tensor is used, every pair is whole, ranks are the config's."""
    clock = PatternClock(limits)
    halves: dict[ModuleName, dict[str, TensorView]] = {}
    for name, tensor in tensors.items():
        match = _TENSOR_NAME.fullmatch(name)
        if match is None:
            _refuse_name(name)
        if len(tensor.shape) != 2:
            _refuse(tensor, f"it has {len(tensor.shape)} dimensions.", "LoRA tensors have two.")
        if match["layer"] is not None:
            module = ModuleName(int(match["layer"]), match["linear"])
        else:
            module = HEAD if match["head_half"] else EMBEDDING
        half_name = match["half"] or match["head_half"] or match["embedding_half"]
        halves.setdefault(module, {})[half_name] = tensor

    pairs: dict[ModuleName, LoraPair] = {}
    for module in sorted(halves):
        half = halves[module]
        if len(half) != 2:
            tensor = next(iter(half.values()))
            missing = "B" if "A" in half else "A"
            _refuse(tensor, f"its lora_{missing} is missing.", "Save the adapter again.")
        is_tied = config.is_tying and module in (EMBEDDING, HEAD)
        if not is_tied and not config.targets(str(module)):
            _refuse(
                half["A"],
                f"the config does not target {module}: a loader would ignore it.",
                "Upload the config that was saved with these tensors.",
            )
        rank = config.rank_of(str(module))
        for tensor, seen in ((half["A"], half["A"].shape[0]), (half["B"], half["B"].shape[1])):
            if seen != rank:
                _refuse(
                    tensor,
                    f"shape {tensor.shape} has rank {seen}, the config says {rank}.",
                    "Upload the config that was saved with these tensors.",
                )
        pairs[module] = LoraPair(half["A"], half["B"], rank, config.scale_of(str(module)))
        clock.check()
    return pairs


def _refuse(tensor: TensorView, message: str, remedy: str) -> NoReturn:
    raise ArtifactError(f"adapter_model.{tensor.name[:200]}", message, remedy)


def _refuse_name(name: str) -> NoReturn:
    field = f"adapter_model.{name[:200]}"
    for part, message, remedy in _FOREIGN_NAMES:
        if part in name:
            raise ArtifactError(field, message, remedy)
    raise ArtifactError(
        field,
        "no layer of the base has this name, so the tensor would be ignored.",
        f"Names look like {_NAME_EXAMPLE} and cover q, k, v, o, gate, up and down projections, "
        "embed_tokens and lm_head.",
    )


def _check_values(pairs: Mapping[ModuleName, LoraPair], limits: AdapterLimits) -> Norms:
    _check_finite(pairs)
    if math.isinf(limits.max_norm):  # checked at upload already; it costs seconds of matmul
        if all(_is_zero(pair) for pair in pairs.values()):
            _refuse_no_effect()
        return Norms(max=math.nan, mean=math.nan)
    norms = [_module_norm(pair) for pair in pairs.values()]
    largest = max(norms)
    if largest == 0.0:
        _refuse_no_effect()
    if largest > limits.max_norm:
        module = list(pairs)[norms.index(largest)]
        _refuse(
            pairs[module].b,
            f"the delta of {module} has norm {largest:.3g}; {limits.max_norm:.3g} is the bound.",
            "The training diverged, or alpha is wrong: check it and save again.",
        )
    return Norms(max=largest, mean=float(np.mean(norms)))


def _check_finite(pairs: Mapping[ModuleName, LoraPair]) -> None:
    for pair in pairs.values():
        for tensor in (pair.a, pair.b):
            if not np.isfinite(tensor.to_float32()).all():
                _refuse(
                    tensor, "it holds NaN or Inf.", "The training diverged: use a sound checkpoint."
                )


def _is_zero(pair: LoraPair) -> bool:
    return any(not tensor.to_float32().any() for tensor in (pair.a, pair.b))


def _refuse_no_effect() -> NoReturn:
    raise ArtifactError(
        "adapter_model",
        "the adapter has no effect: in every module A or B is all zeros.",
        "Upload a trained adapter; B is zero before the first training step.",
    )


def _module_norm(pair: LoraPair) -> float:
    """Frobenius norm of scale * B A, from the small Gram matrices: |BA|^2 = <A A', B' B>.

    In fp64, where no finite fp32 adapter overflows.
    """
    a_RK = pair.a.to_float32().astype(np.float64)
    b_NR = pair.b.to_float32().astype(np.float64)
    # Rounding can leave a tiny negative number where the true norm is zero.
    squared = max(float(np.sum((a_RK @ a_RK.T) * (b_NR.T @ b_NR))), 0.0)
    return abs(pair.scale) * math.sqrt(squared)


def _digest(config: AdapterConfig, tensors: Mapping[str, TensorView]) -> str:
    manifest = {
        "format": MANIFEST_FORMAT,
        "config": msgspec.to_builtins(config),
        "tensors": [
            [name, tensor.dtype, list(tensor.shape), tensor.sha256()]
            for name, tensor in sorted(tensors.items())
        ],
    }
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return "sha256:" + hashlib.sha256(text.encode("ascii")).hexdigest()
