"""Our model and adapters as GGUF files, by llama.cpp's own converters; kept in the cache, named by content.

Run as a program it converts many adapters in one process, since starting one costs more than an adapter:

    python -m bench.peers.llama_files SOURCE MODEL_DIR FOLDER=FILE ...
"""

from __future__ import annotations

import hashlib
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.peers.llama_build import LlamaTools, run

_PART = ".part"


def base_file(
    tools: LlamaTools, model_dir: Path, cache: Path, kind: str, tell: Callable[[str], None]
) -> Path:
    """The base model in `kind`: "bf16", the weights as they are, or "q4_1", quantized from those.

    Raises:
        UnavailableError: the converter or the quantizer failed.
    """
    key = _content_key(model_dir / "model.safetensors")
    plain = cache / "gguf" / f"{key}-bf16.gguf"
    if not plain.exists():
        tell("converting the base model")
        plain.parent.mkdir(parents=True, exist_ok=True)
        converter = tools.root / "convert_hf_to_gguf.py"
        command = [sys.executable, str(converter), str(model_dir), "--outtype", "bf16"]
        _make(command, "--outfile", plain, "converting the base model", _env(tools))
    if kind == "bf16":
        return plain
    quantized = cache / "gguf" / f"{key}-{kind}.gguf"
    if not quantized.exists():
        tell(f"quantizing the base model to {kind}")
        part = quantized.with_name(quantized.name + _PART)
        run([str(tools.quantize), str(plain), str(part), kind.upper()], f"quantizing to {kind}")
        part.replace(quantized)
    return quantized


def adapter_files(
    tools: LlamaTools,
    model_dir: Path,
    folders: Sequence[Path],
    cache: Path,
    tell: Callable[[str], None],
) -> list[Path]:
    """One file per PEFT folder, in 16-bit floats, which llama.cpp's kernels are quickest with.

    Raises:
        UnavailableError: the converter failed.
    """
    files = [
        cache / "gguf" / f"{_content_key(folder / 'adapter_model.safetensors')}-f16.gguf"
        for folder in folders
    ]
    pairs = [
        (folder, file) for folder, file in zip(folders, files, strict=True) if not file.exists()
    ]
    if pairs:
        tell(f"converting {len(pairs)} adapters")
        (cache / "gguf").mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "bench.peers.llama_files", str(tools.root), str(model_dir)]
        command += [f"{folder}={file}" for folder, file in pairs]
        run(command, "converting the adapters", _env(tools))
    return files


def _make(command: list[str], flag: str, file: Path, what: str, env: dict[str, str]) -> None:
    part = file.with_name(file.name + _PART)
    run([*command, flag, str(part)], what, env)
    part.replace(file)


def _env(tools: LlamaTools) -> dict[str, str]:
    path = [str(tools.site), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


def _content_key(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()[:16]


def main() -> None:
    """Convert the adapters named on the command line."""
    source, model_dir, *pairs = sys.argv[1:]
    sys.path.insert(0, source)
    for pair in pairs:
        folder, _, file = pair.rpartition("=")
        sys.argv = ["convert_lora_to_gguf.py", "--base", model_dir, "--outtype", "f16"]
        sys.argv += ["--outfile", file + _PART, folder]
        runpy.run_path(str(Path(source) / "convert_lora_to_gguf.py"), run_name="__main__")
        Path(file + _PART).replace(file)


if __name__ == "__main__":
    main()
