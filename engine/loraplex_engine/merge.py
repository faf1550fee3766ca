"""Merge an adapter into a base model of its own: `python -m loraplex_engine.merge ADAPTER --model M --out FOLDER`.

W + scale * B A in fp32, rounded once to the base's dtype; all other tensors, the tokenizer and the
configuration are copied. On a base whose lm_head shares the embedding's weight, an adapter that changes
the two differently unties them: the new folder has a weight for each and says so in its config.json.
The folder appears whole or not at all (made beside it, then renamed).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from loraplex_engine.artifact import (
    EMBEDDING,
    HEAD,
    AdapterArtifact,
    AdapterLimits,
    ArtifactError,
    LoraPair,
    ModelShape,
    TensorView,
    check_fits,
    read_adapter,
)
from loraplex_engine.config import MAX_LORA_RANK
from loraplex_engine.convert import Advance, cache_dir, check_model_folder, pull, show_progress
from loraplex_engine.errors import EngineError, ModelError

EXIT_FAILED: Final = 1
EMBEDDING_WEIGHT: Final = "model.embed_tokens.weight"
HEAD_WEIGHT: Final = "lm_head.weight"
_INDEX: Final = "model.safetensors.index.json"
_ORIGIN: Final = "loraplex_merge.json"
_COPIED: Final = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "LICENSE",
)


@dataclass(frozen=True, slots=True)
class _Plan:
    """What becomes of each weight."""

    pairs: dict[str, LoraPair]  # by the name of the weight
    # own: lm_head has a weight already; shared: it goes on using the embedding's; new: not any more.
    head: Literal["own", "shared", "new"]


def merge(
    adapter: Path,
    base: Path,
    out: Path,
    advance: Advance,
    *,
    force: bool = False,
    base_name: str = "",
) -> Path:
    """Write `base` with `adapter` merged into it to the new folder `out`.

    Args:
        force: replace `out` if it is a model folder.

    Raises:
        ArtifactError: the adapter is not sound, or not of this base.
        ModelError: the base is not a model folder, `out` exists, or a merged weight is not finite.
    """
    check_model_folder(base)
    _check_target(out, force=force)
    advance("checking the adapter", 0, 1)
    artifact = read_adapter(
        adapter, limits=AdapterLimits(max_rank=MAX_LORA_RANK, max_norm=float("inf"))
    )
    shape = ModelShape.from_config_json(base / "config.json")
    check_fits(artifact, shape, base=base)
    plan = _make_plan(artifact, shape)

    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.parent / f".{out.name}.partial-{uuid.uuid4().hex[:8]}"
    partial.mkdir()
    try:
        _write_weights(base, partial, plan, advance)
        _copy_rest(base, partial, plan)
        origin = {"base": base_name or base.name, "adapter_digest": artifact.digest}
        (partial / _ORIGIN).write_text(json.dumps(origin) + "\n")
        check_model_folder(partial)
        for path in partial.iterdir():
            path.chmod(0o644)  # safetensors writes files that only their owner may read
        _publish(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return out


def _check_target(out: Path, *, force: bool) -> None:
    if not out.exists():
        return
    if not force:
        raise ModelError(f"{out} exists: give another folder, or --force to replace it")
    try:
        check_model_folder(out)
    except ModelError as error:
        raise ModelError(f"{out} is not a model folder, so it is not replaced: {error}") from error


def _make_plan(artifact: AdapterArtifact, shape: ModelShape) -> _Plan:
    pairs = {f"{module}.weight": pair for module, pair in artifact.pairs.items()}
    if not shape.is_tied:
        return _Plan(pairs, "own")
    embedding, head = artifact.pairs.get(EMBEDDING), artifact.pairs.get(HEAD)
    if embedding is None and head is None:
        return _Plan(pairs, "shared")
    if artifact.config.is_tying and embedding and head and embedding.scale == head.scale:
        return _Plan(pairs, "shared")  # one delta for both
    return _Plan(pairs, "new")


def _write_weights(base: Path, out: Path, plan: _Plan, advance: Advance) -> None:
    files = sorted(base.glob("*.safetensors"))
    names_by_file: dict[str, set[str]] = {}
    for path in files:
        with _open(path) as file:
            names_by_file[path.name] = set(file.keys())
    all_names = set().union(*names_by_file.values())
    wanted = set(plan.pairs) - ({HEAD_WEIGHT} if plan.head != "own" else set())
    missing = sorted(wanted - all_names)
    if missing:
        raise ModelError(f"{base}: there is no tensor {missing[0]} to merge into")

    done, total_bytes = 0, 0
    weight_map: dict[str, str] = {}
    for path in files:
        tensors: dict[str, Tensor] = {}
        with _open(path) as file:
            metadata = file.metadata()
            for name in sorted(names_by_file[path.name]):
                tensors.update(_become(name, file.get_tensor(name), plan))
                done += 1
                advance("merging", done, len(all_names))
        try:
            save_file(tensors, out / path.name, metadata=metadata or {"format": "pt"})
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{out / path.name} could not be written: {error}") from error
        weight_map.update(dict.fromkeys(tensors, path.name))
        total_bytes += sum(tensor.nbytes for tensor in tensors.values())
    if (base / _INDEX).exists():
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        (out / _INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _open(path: Path) -> Any:  # noqa: ANN401 - safetensors has no type for it
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} could not be read: {error}") from error


def _become(name: str, weight: Tensor, plan: _Plan) -> dict[str, Tensor]:
    """The new tensors that come of an old one."""
    if name == HEAD_WEIGHT and plan.head != "own":
        return {}  # a copy of the shared weight, which some folders carry
    tensors = {name: _merged(name, weight, plan)}
    if name == EMBEDDING_WEIGHT and plan.head == "new":
        # Cloned: one file cannot hold one memory under two names.
        tensors[HEAD_WEIGHT] = _merged(HEAD_WEIGHT, weight, plan).clone()
    return tensors


def _merged(name: str, weight: Tensor, plan: _Plan) -> Tensor:
    pair = plan.pairs.get(name)
    if pair is None:
        return weight
    delta = _copied(pair.b) @ _copied(pair.a)
    if name == EMBEDDING_WEIGHT:
        delta = delta.T  # PEFT's A is (rank, vocabulary), the weight (vocabulary, hidden)
    result = (weight.float() + delta * pair.scale).to(weight.dtype)
    if not torch.isfinite(result).all():
        raise ModelError(
            f"{name} does not fit {str(weight.dtype).removeprefix('torch.')} once merged: "
            "the adapter's delta is too large"
        )
    return result.contiguous()


def _copied(tensor: TensorView) -> Tensor:
    """fp32, in memory that torch may write."""
    return torch.from_numpy(np.array(tensor.to_float32()))


def _copy_rest(base: Path, out: Path, plan: _Plan) -> None:
    for name in _COPIED:
        if (base / name).is_file():
            shutil.copyfile(base / name, out / name)
    if plan.head == "new":
        config = json.loads((out / "config.json").read_text(encoding="utf-8"))
        config["tie_word_embeddings"] = False
        (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _publish(partial: Path, out: Path) -> None:
    if not out.exists():
        os.rename(partial, out)
        return
    old = partial.with_name(f"{partial.name}-old")
    os.rename(out, old)
    try:
        os.rename(partial, out)
    except OSError:
        os.rename(old, out)
        raise
    shutil.rmtree(old)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m loraplex_engine.merge",
        description="Merge a LoRA adapter into a base model of its own.",
    )
    parser.add_argument("adapter", type=Path, help="PEFT folder of the adapter")
    parser.add_argument(
        "--model", required=True, help="the base: a folder, or a name of `loraplex models pull`"
    )
    parser.add_argument("--out", type=Path, required=True, help="the new folder")
    parser.add_argument("--force", action="store_true", help="replace it if it is a model folder")
    values = parser.parse_args(arguments)
    try:
        with show_progress() as advance:
            base = pull(values.model, cache_dir(), advance)
            out = merge(
                values.adapter,
                base,
                values.out.absolute(),
                advance,
                force=values.force,
                base_name=values.model,
            )
    except ArtifactError as error:
        sys.stderr.write(f"merge: {error.field}: {error.message} {error.remedy}\n")
        return EXIT_FAILED
    except (EngineError, OSError) as error:
        sys.stderr.write(f"merge: {error}\n")
        return EXIT_FAILED
    except KeyboardInterrupt:
        sys.stderr.write("merge: interrupted; nothing was kept\n")
        return 130
    sys.stdout.write(f"{out}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
