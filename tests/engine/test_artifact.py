"""Reading an adapter: what is sound comes through exactly, everything else is refused with a reason."""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loraplex_engine.artifact import (
    CONFIG_FILE,
    EMBEDDING,
    HEAD,
    TENSORS_FILE,
    AdapterArtifact,
    AdapterLimits,
    ArtifactError,
    ModelShape,
    ModuleName,
    check_file_name,
    check_fits,
    parse_adapter_config,
    read_adapter,
    read_tensors,
)
from loraplex_engine.errors import ModelError
from safetensors.torch import save as save_safetensors

from tests.support.adapter_files import (
    ALL_LINEARS,
    SMOLLM2_SHAPE,
    TINY_SHAPE,
    encode_safetensors,
    encode_tensors,
    lora_config,
    lora_tensors,
    make_adapter,
    write_folder,
)

LIMITS = AdapterLimits()
OLD_DIGEST = "sha256:ddafde4d9cc0946465459548c1fdb3ef9a41b9047e881966fe26d718aea4e8fe"
Q0_A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
Q0_B = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"


def read(folder: Path, **changes: Any) -> AdapterArtifact:
    return read_adapter(folder, limits=AdapterLimits(**changes))


def refused(folder: Path, config: Any, model: bytes, **limits: Any) -> ArtifactError:
    """The error that reading such a folder ends with; it always says what to do."""
    write_folder(folder, config, model)
    with pytest.raises(ArtifactError) as caught:
        read(folder, **limits)
    assert caught.value.message
    assert caught.value.remedy
    return caught.value


# ------------------------------------------------------------------------------------------- sound


def test_a_sound_adapter_is_described(tmp_path: Path) -> None:
    artifact = make_adapter(tmp_path / "a", rank=4, linears=["q_proj", "down_proj"], seed=1)

    assert artifact.rank_max == 4
    assert artifact.target_modules == ("down_proj", "q_proj")
    assert list(artifact.pairs) == [
        ModuleName(0, "mlp.down_proj"),
        ModuleName(0, "self_attn.q_proj"),
        ModuleName(1, "mlp.down_proj"),
        ModuleName(1, "self_attn.q_proj"),
    ]
    assert artifact.num_parameters == 2 * 4 * (64 + 64 + 96 + 64)
    assert artifact.size_bytes == sum(f.stat().st_size for f in (tmp_path / "a").iterdir())
    assert artifact.digest.startswith("sha256:")
    assert all(check.detail for check in artifact.checks)
    fit = check_fits(artifact, TINY_SHAPE)
    assert (fit.matched_modules, fit.total_modules) == (4, 14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_values_are_read_as_torch_reads_them(dtype: torch.dtype) -> None:
    values = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)).to(dtype)
    values[0, :4] = torch.tensor([0.0, -0.0, 2.0**-133, -1.5]).to(dtype)  # a subnormal too

    view = read_tensors(save_safetensors({"t": values}), limits=LIMITS)["t"]

    assert np.array_equal(view.to_float32(), values.float().numpy())
    assert view.bits().tobytes() == values.contiguous().view(torch.uint8).numpy().tobytes()
    with pytest.raises(ValueError, match="read-only"):
        view.bits()[0, 0] = 1


def test_the_norm_is_that_of_the_delta(tmp_path: Path) -> None:
    make_adapter(tmp_path / "a", lora_alpha=24, use_rslora=True, dtype="F32")
    artifact = read(tmp_path / "a")

    norms = [
        pair.scale * np.linalg.norm(pair.b.to_float32() @ pair.a.to_float32())
        for pair in artifact.pairs.values()
    ]

    assert math.isclose(artifact.norms.max, max(norms), rel_tol=1e-5)
    assert math.isclose(artifact.norms.mean, sum(norms) / len(norms), rel_tol=1e-5)


def test_no_torch_is_imported() -> None:
    code = "import sys, loraplex_engine.artifact; assert 'torch' not in sys.modules"

    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# ------------------------------------------------------------------------------------------ digest


def test_the_digest_ignores_what_changes_no_answer(tmp_path: Path) -> None:
    tensors = lora_tensors()
    first = write_folder(tmp_path / "1", lora_config(), encode_tensors(tensors))
    backwards = dict(reversed(tensors.items()))
    second = write_folder(
        tmp_path / "2",
        lora_config(
            base_model_name_or_path="/another/path",
            lora_dropout=0.3,
            lora_alpha=16.0,
            target_modules=["v_proj", "q_proj"],
            peft_version="9.9",
        ),
        encode_tensors(backwards, metadata={"format": "pt", "note": "x"}),
    )

    assert read(first).digest == read(second).digest


@pytest.mark.parametrize(
    "change",
    [
        {"lora_alpha": 17},
        {"use_rslora": True},
        {"alpha_pattern": {"q_proj": 3}},
        {"target_modules": ["q_proj", "v_proj", "k_proj"]},
        {"exclude_modules": ["o_proj"]},
        {"layers_to_transform": [0, 1]},
    ],
    ids=str,
)
def test_the_digest_covers_every_field_that_changes_the_result(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    model = encode_tensors(lora_tensors())
    plain = read(write_folder(tmp_path / "1", lora_config(), model))

    changed = read(write_folder(tmp_path / "2", lora_config(**change), model))

    assert changed.digest != plain.digest


def test_the_digest_covers_pattern_order(tmp_path: Path) -> None:
    """The first pattern that matches wins, so the order is part of the meaning."""
    model = encode_tensors(lora_tensors())
    patterns = {"q_proj": 3, r"layers\.0\.self_attn\.q_proj": 5}
    config = lora_config(alpha_pattern=patterns)
    other = lora_config(alpha_pattern=dict(reversed(patterns.items())))

    one = read(write_folder(tmp_path / "1", config, model))
    two = read(write_folder(tmp_path / "2", other, model))

    assert one.digest != two.digest
    assert one.pairs[ModuleName(0, "self_attn.q_proj")].scale == 3 / 8
    assert two.pairs[ModuleName(0, "self_attn.q_proj")].scale == 5 / 8


def test_the_digest_covers_every_bit_of_every_tensor(tmp_path: Path) -> None:
    tensors = lora_tensors()
    digests = {read(write_folder(tmp_path / "0", lora_config(), encode_tensors(tensors))).digest}
    for index, name in enumerate(tensors):
        changed = {key: value.copy() for key, value in tensors.items()}
        changed[name][-1, -1] = np.nextafter(changed[name][-1, -1], np.float32(9))
        folder = write_folder(tmp_path / str(index + 1), lora_config(), encode_tensors(changed))
        digests.add(read(folder).digest)

    assert len(digests) == 1 + len(tensors)
    stored_as_bf16 = write_folder(
        tmp_path / "bf16", lora_config(), encode_tensors(tensors, dtype="BF16")
    )
    assert read(stored_as_bf16).digest not in digests


# ------------------------------------------------------------------------------- files and folders


def test_a_pickle_is_refused_unopened(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
            return os.mkdir, (str(tmp_path / "exploded"),)

    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        error = refused(tmp_path / "a", lora_config(), pickle.dumps(Bomb(), protocol=protocol))

        assert error.field == "adapter_model"
        assert protocol < 2 or "pickle" in error.message
    assert not (tmp_path / "exploded").exists()


def test_a_torch_archive_is_refused(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    torch.save({"x": torch.zeros(3)}, buffer)

    error = refused(tmp_path / "a", lora_config(), buffer.getvalue())

    assert "zip" in error.message


def test_a_zip_of_an_adapter_is_refused(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(TENSORS_FILE, encode_tensors(lora_tensors()))

    assert "zip" in refused(tmp_path / "a", lora_config(), buffer.getvalue()).message


def test_other_formats_are_named(tmp_path: Path) -> None:
    for start, word in (
        (b"\x1f\x8b", "gzip"),
        (b"GGUF", "GGUF"),
        (b"version https://git-lfs", "LFS"),
    ):
        assert word in refused(tmp_path / "a", lora_config(), start + bytes(1000)).message
    tar = bytes(257) + b"ustar" + bytes(250)
    assert "tar" in refused(tmp_path / "a", lora_config(), tar).message


@pytest.mark.parametrize(
    "name",
    [
        "../adapter_config.json",
        "/etc/passwd",
        "..\\adapter_model.safetensors",
        "a/adapter_model.safetensors",
        "adapter_model.safetensors\0.png",
    ],
)
def test_a_path_is_no_file_name(name: str) -> None:
    with pytest.raises(ArtifactError, match="is a path") as caught:
        check_file_name(name)

    assert caught.value.field == "filename"


@pytest.mark.parametrize(
    "name", ["adapter_model.bin", "adapter_model.pt", "x.zip", "", "README.md"]
)
def test_other_files_are_no_part_of_an_adapter(name: str) -> None:
    with pytest.raises(ArtifactError, match="not part of an adapter"):
        check_file_name(name)
    check_file_name(CONFIG_FILE)
    check_file_name(TENSORS_FILE)


def test_a_folder_must_hold_exactly_the_two_files(tmp_path: Path) -> None:
    make_adapter(tmp_path / "a")
    (tmp_path / "a" / "adapter_model.bin").write_bytes(b"x")
    with pytest.raises(ArtifactError, match=r"adapter_model\.bin"):
        read(tmp_path / "a")

    make_adapter(tmp_path / "b")
    (tmp_path / "b" / CONFIG_FILE).unlink()
    with pytest.raises(ArtifactError, match="missing") as caught:
        read(tmp_path / "b")
    assert caught.value.field == CONFIG_FILE

    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ArtifactError, match="not a folder"):
        read(tmp_path / "file")


def test_links_and_devices_are_not_followed(tmp_path: Path) -> None:
    make_adapter(tmp_path / "real")
    make_adapter(tmp_path / "a")
    (tmp_path / "a" / TENSORS_FILE).unlink()
    (tmp_path / "a" / TENSORS_FILE).symlink_to(tmp_path / "real" / TENSORS_FILE)
    with pytest.raises(ArtifactError, match="symbolic link"):
        read(tmp_path / "a")

    (tmp_path / "a" / TENSORS_FILE).unlink()
    os.mkfifo(tmp_path / "a" / TENSORS_FILE)
    with pytest.raises(ArtifactError, match="regular file"):
        read(tmp_path / "a")


def test_size_caps_are_checked_before_reading(tmp_path: Path) -> None:
    make_adapter(tmp_path / "a")

    with pytest.raises(ArtifactError, match="are allowed") as caught:
        read(tmp_path / "a", max_model_bytes=1000)
    assert caught.value.field == TENSORS_FILE
    with pytest.raises(ArtifactError, match="are allowed") as caught:
        read(tmp_path / "a", max_config_bytes=10)
    assert caught.value.field == CONFIG_FILE


# ----------------------------------------------------------------------------------- tensor header


def header_with(**entries: Any) -> bytes:
    """Two sound tensors of 16 bytes each, "a" then "b", with changed entries."""
    sound = {
        "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
        "b": {"dtype": "F32", "shape": [4, 1], "data_offsets": [16, 32]},
    }
    merged = {name: sound.get(name, {}) | change for name, change in {**sound, **entries}.items()}
    return encode_safetensors(json.dumps(merged), bytes(32))


def test_the_sound_header_of_these_tests_is_accepted() -> None:
    assert list(read_tensors(header_with(), limits=LIMITS)) == ["a", "b"]


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (b"", "too few"),
        (b"\x01", "too few"),
        (header_with()[:-1], "truncated"),
        (header_with()[:100], "truncated"),
        (header_with() + b"\0", "belong to no tensor"),
        ((1 << 40).to_bytes(8, "little") + b"{}", "claims"),
        (encode_safetensors("{}", b""), "no tensors"),
        (encode_safetensors("[]", b""), "does not start"),
        (encode_safetensors(" {}", b""), "does not start"),
        (encode_safetensors('{"a": ', b""), "not valid JSON"),
        (encode_safetensors(b"{\xff}", b""), "not valid JSON"),
        (encode_safetensors('{"a":' * 100_000, b""), "not valid JSON"),
        (encode_safetensors('{"a": NaN}', b""), "not JSON"),
        (encode_safetensors('{"a": {}, "a": {}}', b""), "twice"),
        (encode_safetensors('{"a": {"dtype": "F32", "dtype": "F16"}}', b""), "twice"),
        (encode_safetensors('{"__metadata__": {"k": 1}}', b""), "strings"),
        (header_with(b={"data_offsets": [8, 24]}), "overlap"),
        (header_with(b={"data_offsets": [0, 16]}), "overlap"),
        (header_with(a={"shape": [1, 2], "data_offsets": [0, 8]}), "belong to no tensor"),
        (header_with(a={"shape": [1, 2], "data_offsets": [8, 16]}), "belong to no tensor"),
        (header_with(b={"data_offsets": [16, 99]}), "truncated"),
        (header_with(b={"data_offsets": [32, 16]}), "truncated or damaged"),
        (header_with(b={"data_offsets": [-16, 0]}), "non-negative"),
        (header_with(b={"data_offsets": [16.0, 32.0]}), "non-negative"),
        (header_with(b={"data_offsets": [16, 32, 48]}), "two non-negative"),
        (header_with(b={"data_offsets": [True, 32]}), "non-negative"),
        (header_with(b={"shape": [0, 4]}), "empty"),
        (header_with(b={"shape": [3, 1]}), "takes 12 bytes"),
        (header_with(b={"shape": [1 << 33, 1 << 33]}), "takes"),
        (header_with(b={"shape": [1 << 60]}), "non-negative"),
        (header_with(b={"shape": [-4, -1]}), "non-negative"),
        (header_with(b={"shape": "4"}), "list"),
        (header_with(b={"dtype": "I8"}), "F16, BF16 and F32"),
        (header_with(b={"dtype": ["F32"]}), "F16, BF16 and F32"),
        (header_with(b={"extra": 1}), "exactly"),
        (header_with(c={"dtype": "F32"}), "exactly"),
    ],
)
def test_malformed_headers_are_refused(file: bytes, message: str) -> None:
    with pytest.raises(ArtifactError, match=message) as caught:
        read_tensors(file, limits=LIMITS)

    assert caught.value.field.startswith("adapter_model")
    assert caught.value.remedy


@pytest.mark.parametrize("char", ["\ud800", "\0", "\n", "\u202e"])
def test_what_is_not_printable_is_escaped_in_every_complaint(tmp_path: Path, char: str) -> None:
    """A lone surrogate, which JSON can carry, has no UTF-8: quoted as it is, it would be our fault."""
    model = encode_tensors(lora_tensors())
    name = f"a{char}b"
    for config, file in (
        (lora_config(**{name: True}), model),
        (lora_config(target_modules=["q_proj", name]), model),
        (lora_config(target_modules=f".*{name}"), model),
        (lora_config(rank_pattern={name: 8}), model),
        (lora_config(), header_with(**{name: {"dtype": "F32"}})),
        (lora_config(), encode_tensors({name: np.ones((2, 2), np.float32)})),
    ):
        error = refused(tmp_path / "a", config, file)

        assert all(part.isprintable() for part in (str(error), error.field, error.message))
        str(error).encode()


def test_header_caps() -> None:
    with pytest.raises(ArtifactError, match="2 tensors; 1 are allowed"):
        read_tensors(header_with(), limits=AdapterLimits(max_tensors=1))
    with pytest.raises(ArtifactError, match="claims"):
        read_tensors(header_with(), limits=AdapterLimits(max_header_bytes=20))


@given(st.binary(max_size=200))
def test_no_bytes_crash_the_reader(file: bytes) -> None:
    for attempt in (file, len(file).to_bytes(8, "little") + file, b"{".join([file, file])):
        with pytest.raises(ArtifactError):
            read_tensors(attempt, limits=LIMITS)


@given(st.data())
def test_no_flipped_byte_crashes_the_reader(data: st.DataObject) -> None:
    file = bytearray(header_with())
    position = data.draw(st.integers(0, len(file) - 1))
    file[position] ^= data.draw(st.integers(1, 255))

    try:
        views = read_tensors(bytes(file), limits=LIMITS)
    except ArtifactError:
        return
    assert sum(view.size_bytes for view in views.values()) == 32


# ------------------------------------------------------------------------------------------ config


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"peft_type": "LOHA"}, "peft_type"),
        ({"peft_type": "ADALORA"}, "peft_type"),
        ({"peft_type": None}, "peft_type"),
        ({"task_type": "SEQ_CLS"}, "task_type"),
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias"),
        ({"bias": "lora_only"}, "bias"),
        ({"lora_bias": True}, "lora_bias"),
        ({"trainable_token_indices": [1, 2]}, "trainable_token_indices"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"target_parameters": ["w"]}, "target_parameters"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        ({"use_qalora": True}, "use_qalora"),
        ({"use_bdlora": {"nblocks": 2}}, "use_bdlora"),
        ({"arrow_config": {"top_k": 1}}, "arrow_config"),
        ({"kasa_config": {"x": 1}}, "kasa_config"),
        ({"velora_config": {"scale": 1}}, "velora_config"),
        ({"monteclora_config": {"x": 1}}, "monteclora_config"),
        ({"megatron_config": {"x": 1}}, "megatron_config"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights"),
        ({"init_lora_weights": "olora"}, "init_lora_weights"),
        ({"init_lora_weights": "what comes next"}, "init_lora_weights"),
        ({"auto_mapping": {"AutoModel": "modeling_evil.Evil"}}, "auto_mapping"),
        (
            {"auto_mapping": {"base_model_class": "Evil", "parent_library": "evil.code"}},
            "auto_mapping",
        ),
        ({"a_feature_of_tomorrow": 3}, "a_feature_of_tomorrow"),
        ({"r": 65}, "r"),
        ({"r": 0}, "r"),
        ({"r": -1}, "r"),
        ({"r": 8.0}, "r"),
        ({"r": True}, "r"),
        ({"r": "8"}, "r"),
        ({"rank_pattern": {"q_proj": 65}}, "rank_pattern"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern"),
        ({"rank_pattern": {"q_proj(": 4}}, "rank_pattern"),
        ({"rank_pattern": {"q" * 2000: 4}}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": "x"}}, "alpha_pattern"),
        ({"alpha_pattern": {"q_proj": 0}}, "alpha_pattern"),
        ({"lora_alpha": 0}, "lora_alpha"),
        ({"lora_alpha": 1e300}, "lora_alpha"),
        ({"lora_alpha": None}, "lora_alpha"),
        ({"use_rslora": 1}, "use_rslora"),
        ({"target_modules": None}, "target_modules"),
        ({"target_modules": []}, "target_modules"),
        ({"target_modules": ""}, "target_modules"),
        ({"target_modules": [1]}, "target_modules"),
        ({"target_modules": [""]}, "target_modules"),
        ({"target_modules": "(q_proj"}, "target_modules"),
        ({"layers_to_transform": [-1]}, "layers_to_transform"),
        ({"layers_to_transform": ["1"]}, "layers_to_transform"),
        ({"layers_to_transform": [1], "target_modules": ".*q_proj"}, "layers_to_transform"),
        ({"layers_pattern": "layers"}, "layers_pattern"),
    ],
    ids=str,
)
def test_configs_that_ask_for_more_or_less_are_refused(change: dict[str, Any], field: str) -> None:
    with pytest.raises(ArtifactError) as caught:
        parse_adapter_config(json.dumps(lora_config(**change)).encode(), limits=LIMITS)

    assert caught.value.field == f"adapter_config.{field}"
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "not valid JSON"),
        (b"[]", "not a JSON object"),
        (b"\xff\xfe", "not valid JSON"),
        (b'{"r": 8, "r": 16}', "twice"),
        (b'{"r": NaN}', "NaN"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"r": ' + b"9" * 5000 + b"}", "not valid JSON"),
    ],
    ids=["empty", "array", "utf-16", "duplicate", "nan", "deep", "huge integer"],
)
def test_configs_that_are_not_json_are_refused(raw: bytes, message: str) -> None:
    with pytest.raises(ArtifactError, match=message):
        parse_adapter_config(raw, limits=LIMITS)


def test_switched_off_features_are_no_reason_to_refuse() -> None:
    config = lora_config(
        a_feature_of_tomorrow=None,
        another_one=False,
        third=[],
        layer_replication=None,
        loftq_config={},
        auto_mapping={
            "base_model_class": "LlamaForCausalLM",
            "parent_library": "transformers.models.llama.modeling_llama",
        },
        task_type=None,
        init_lora_weights="gaussian",
    )

    assert parse_adapter_config(json.dumps(config).encode(), limits=LIMITS).rank == 8


# ------------------------------------------------------------------------- tensors against config


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector", "DoRA"),
        ("base_model.model.model.embed_tokens.lora_embedding_A.weight", "embeddings"),
        ("base_model.model.model.embed_tokens.lora_A.weight", "embeddings"),
        ("base_model.model.model.embed_tokens.weight", "embeddings"),
        ("base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight", "of the base"),
        ("base_model.model.lm_head.weight", "head"),
        ("base_model.model.model.lm_head.lora_A.weight", "head"),
        ("base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta", "embeddings"),
        ("base_model.model.lm_head.modules_to_save.weight", "replaces a module"),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_B.bias", "biases"),
        ("base_model.model.model.layers.0.self_attn.q_proj.weight", "ignored"),
        ("base_model.model.language_model.layers.0.self_attn.q_proj.lora_A.weight", "ignored"),
        ("model.layers.0.self_attn.q_proj.lora_A.weight", "ignored"),
        ("base_model.model.model.layers.00.self_attn.q_proj.lora_A.weight", "ignored"),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight ", "ignored"),
        ("base_model.model.model.layers.0.mlp.experts.0.gate_proj.lora_A.weight", "ignored"),
    ],
)
def test_tensors_that_would_be_ignored_are_refused(tmp_path: Path, name: str, word: str) -> None:
    tensors = lora_tensors() | {name: np.ones((8, 8), dtype=np.float32)}

    error = refused(tmp_path / "a", lora_config(), encode_tensors(tensors))

    assert error.field == f"adapter_model.{name}"
    assert word in error.message


def test_tensors_of_a_module_that_is_not_targeted_are_refused(tmp_path: Path) -> None:
    tensors = lora_tensors(linears=["q_proj", "v_proj", "o_proj"])

    error = refused(tmp_path / "a", lora_config(), encode_tensors(tensors))

    assert "does not target model.layers.0.self_attn.o_proj" in error.message


def test_half_a_pair_is_refused(tmp_path: Path) -> None:
    tensors = lora_tensors()
    del tensors[Q0_B]

    error = refused(tmp_path / "a", lora_config(), encode_tensors(tensors))

    assert error.field == f"adapter_model.{Q0_A}"
    assert "lora_B is missing" in error.message


def test_a_rank_other_than_the_configs_is_refused(tmp_path: Path) -> None:
    error = refused(tmp_path / "a", lora_config(r=4), encode_tensors(lora_tensors(rank=8)))

    assert "has rank 8, the config says 4" in error.message


def test_the_rank_cap_is_the_servers(tmp_path: Path) -> None:
    model = encode_tensors(lora_tensors(rank=16))

    error = refused(tmp_path / "a", lora_config(r=16), model, max_rank=8)

    assert "rank 16 is beyond the cap of 8" in error.message


def test_three_dimensions_are_refused(tmp_path: Path) -> None:
    tensors = lora_tensors()
    tensors[Q0_A] = tensors[Q0_A][None]

    assert "3 dimensions" in refused(tmp_path / "a", lora_config(), encode_tensors(tensors)).message


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
def test_nan_and_inf_are_refused(tmp_path: Path, value: float, dtype: str) -> None:
    tensors = lora_tensors()
    tensors[Q0_B][3, 1] = value

    error = refused(tmp_path / "a", lora_config(), encode_tensors(tensors, dtype=dtype))

    assert error.field == f"adapter_model.{Q0_B}"
    assert "NaN or Inf" in error.message


@pytest.mark.parametrize("half", ["lora_A", "lora_B"])
def test_an_adapter_without_effect_is_refused(tmp_path: Path, half: str) -> None:
    tensors = {
        name: np.zeros_like(values) if half in name else values
        for name, values in lora_tensors().items()
    }

    assert "no effect" in refused(tmp_path / "a", lora_config(), encode_tensors(tensors)).message


def test_a_delta_beyond_the_norm_bound_is_refused(tmp_path: Path) -> None:
    tensors = lora_tensors()
    tensors[Q0_B] *= 1e6

    error = refused(tmp_path / "a", lora_config(), encode_tensors(tensors))

    assert error.field == f"adapter_model.{Q0_B}"
    assert read(tmp_path / "a", max_norm=1e300).norms.max > 1e6


def test_norms_do_not_overflow(tmp_path: Path) -> None:
    tensors = {name: np.full_like(v, 3e38) for name, v in lora_tensors().items()}
    write_folder(tmp_path / "a", lora_config(), encode_tensors(tensors))

    assert math.isfinite(read(tmp_path / "a", max_norm=1e300).norms.max)


def test_without_a_norm_bound_no_norm_is_computed_but_the_rest_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraplex_engine.artifact.reader._module_norm", None)
    good = lora_tensors()
    idle = {name: v * ("lora_B" not in name) for name, v in good.items()}
    sick = {name: np.full_like(v, math.nan) for name, v in good.items()}
    write_folder(tmp_path / "good", lora_config(), encode_tensors(good))

    assert math.isnan(read(tmp_path / "good", max_norm=math.inf).norms.max)
    for name, tensors, said in (("idle", idle, "no effect"), ("sick", sick, "NaN or Inf")):
        content = encode_tensors(tensors)
        error = refused(tmp_path / name, lora_config(), content, max_norm=math.inf)
        assert said in error.message


@pytest.mark.parametrize(
    "pattern",
    [
        "(a*)*x",
        "((a|.)*)*x",
        "(.|.)+x",
        "(?:.+){2,}",
        "(?=.*)x",
        "(?P<n>a)x",
        "(.)\\1",
        ".*.*.*.*.*.*.*x",
        "a?" * 30,
        "(.|.)" * 40,
        "(.|.|.|.|.|.|.|.|.|.)" * 8,
        "(a|ab|abc)" * 16,
        "(.|.).*.*.*.*.*.*x",
        "a)(b",
        "q_proj(",
        "[",
    ],
)
def test_patterns_that_could_stop_the_engine_are_refused(pattern: str) -> None:
    """One match of the second takes longer than the universe is old, with the interpreter held."""
    for change in (
        {"alpha_pattern": {pattern: 3}},
        {"rank_pattern": {pattern: 3}},
        {"target_modules": pattern},
        {"exclude_modules": pattern},
        {"layers_pattern": [pattern], "layers_to_transform": [1]},
    ):
        with pytest.raises(ArtifactError, match="is not accepted"):
            parse_adapter_config(json.dumps(lora_config(**change)).encode(), limits=LIMITS)


@pytest.mark.parametrize(
    "pattern",
    [
        "q_proj",
        r"model\.layers\.(0|1|2)\.self_attn\.(q|v)_proj",
        r"^.*self_attn\.[qkv]_proj$",
        r"(?:.*?(?:text|language).*?(?:self_attn|mlp).*?(?:q_proj|v_proj).*?)"
        r"|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj|v_proj)))",
        r"layers\.[]0-9[]+\.x",
        "(self_attn.)?q_proj",
        rf".*\.({'|'.join(map(str, range(30)))})\.(self_attn|mlp)\.(q|k|v|o|gate|up|down)_proj",
    ],
)
def test_patterns_that_people_use_are_accepted(pattern: str) -> None:
    config = parse_adapter_config(
        json.dumps(lora_config(alpha_pattern={pattern: 3})).encode(), limits=LIMITS
    )

    assert config.alpha_pattern == ((pattern, 3.0),)


def test_slow_patterns_are_refused_by_the_clock(tmp_path: Path) -> None:
    error = refused(
        tmp_path / "a", lora_config(), encode_tensors(lora_tensors()), max_pattern_seconds=-1.0
    )

    assert "too long" in error.message


def test_the_clock_runs_for_modules_without_tensors_too(tmp_path: Path) -> None:
    artifact = make_adapter(tmp_path / "a")

    with pytest.raises(ArtifactError, match="too long"):
        check_fits(artifact, TINY_SHAPE, limits=AdapterLimits(max_pattern_seconds=-1.0))


@pytest.mark.parametrize(
    "pattern",
    [".*.*.*.*.*.*[!]", "(.|.)" * 23 + "!", "(.|..|...)" * 14 + "!", "(.|.)(.|.).*.*.*.*.*[!]"],
)
def test_the_slowest_patterns_that_are_accepted_end_soon(pattern: str) -> None:
    """Nothing can interrupt a match, so the clock alone would not do."""
    raw = json.dumps(lora_config(target_modules=pattern)).encode()
    config = parse_adapter_config(raw, limits=LIMITS)
    started_s = time.thread_time()

    assert not config.targets("model.layers.29.self_attn.q_proj")

    assert time.thread_time() - started_s < 10.0


def test_patterns_are_counted_together() -> None:
    patterns = {f".*.*.*.*[{index}]": 3 for index in range(200)}

    with pytest.raises(ArtifactError, match="with the others"):
        parse_adapter_config(
            json.dumps(lora_config(alpha_pattern=patterns)).encode(), limits=LIMITS
        )


# -------------------------------------------------------------------------------- fit to the base


def test_an_adapter_of_another_base_is_refused(tmp_path: Path) -> None:
    artifact = make_adapter(tmp_path / "a")

    with pytest.raises(ArtifactError, match="takes 576 inputs") as caught:
        check_fits(artifact, SMOLLM2_SHAPE)

    assert "another base" in caught.value.remedy


@pytest.mark.parametrize("linear", ALL_LINEARS)
@pytest.mark.parametrize("half", ["A", "B"])
def test_a_wrong_shape_is_refused_wherever_it_is(tmp_path: Path, linear: str, half: str) -> None:
    tensors = lora_tensors(linears=ALL_LINEARS)
    name = next(
        key
        for key in tensors
        if f"layers.1.{linear}.lora_{half}" in key.replace("self_attn.", "").replace("mlp.", "")
    )
    axis = 1 if half == "A" else 0
    tensors[name] = np.concatenate([tensors[name], tensors[name]], axis=axis)
    write_folder(
        tmp_path / "a", lora_config(target_modules=list(ALL_LINEARS)), encode_tensors(tensors)
    )
    artifact = read(tmp_path / "a")

    with pytest.raises(ArtifactError) as caught:
        check_fits(artifact, TINY_SHAPE)

    assert caught.value.field == f"adapter_model.{name}"


def test_a_layer_beyond_the_base_is_refused(tmp_path: Path) -> None:
    artifact = make_adapter(tmp_path / "a", layers=[2])

    with pytest.raises(ArtifactError, match="the base has 2 layers"):
        check_fits(artifact, TINY_SHAPE)


def test_a_targeted_module_without_tensors_is_refused(tmp_path: Path) -> None:
    tensors = {k: v for k, v in lora_tensors().items() if "layers.1.self_attn.v_proj" not in k}
    write_folder(tmp_path / "a", lora_config(), encode_tensors(tensors))
    artifact = read(tmp_path / "a")

    with pytest.raises(ArtifactError, match=r"targets model\.layers\.1\.self_attn\.v_proj"):
        check_fits(artifact, TINY_SHAPE)


def test_the_shape_is_read_from_config_json(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    raw = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 128,
    }
    path.write_text(json.dumps(raw))
    assert ModelShape.from_config_json(path).num_kv_heads == 4

    path.write_text(json.dumps(raw | {"num_key_value_heads": 2, "head_dim": 16}))
    assert ModelShape.from_config_json(path) == TINY_SHAPE

    path.write_text("{}")
    with pytest.raises(ModelError, match="Llama-family"):
        ModelShape.from_config_json(path)
    with pytest.raises(ModelError, match="cannot be read"):
        ModelShape.from_config_json(tmp_path / "none")


# ------------------------------------------------------------------------------ embedding and head


def test_embedding_and_head_are_read_and_fit(tmp_path: Path) -> None:
    artifact = make_adapter(tmp_path / "a", linears=["q_proj", "embed_tokens", "lm_head"], rank=4)

    fit = check_fits(artifact, TINY_SHAPE)

    assert artifact.target_modules == ("embed_tokens", "lm_head", "q_proj")
    assert artifact.pairs[EMBEDDING].a.shape == (4, TINY_SHAPE.vocab_size)
    assert artifact.pairs[EMBEDDING].b.shape == (TINY_SHAPE.hidden_size, 4)
    assert artifact.pairs[HEAD].a.shape == (4, TINY_SHAPE.hidden_size)
    assert (fit.matched_modules, fit.total_modules) == (4, 16)
    assert list(artifact.pairs)[:2] == [HEAD, EMBEDDING]


@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
def test_an_adapter_trained_with_added_tokens_is_refused(tmp_path: Path, target: str) -> None:
    larger = msgspec.structs.replace(TINY_SHAPE, vocab_size=TINY_SHAPE.vocab_size + 8)
    artifact = make_adapter(tmp_path / "a", larger, linears=[target])

    with pytest.raises(ArtifactError, match="added tokens are not served"):
        check_fits(artifact, TINY_SHAPE)


def test_a_field_that_came_later_changes_no_older_digest(tmp_path: Path) -> None:
    """Digests of this very adapter, taken before LoRA on embeddings was served."""
    plain = make_adapter(tmp_path / "a", rank=4, seed=1)
    tied_without_embeddings = make_adapter(tmp_path / "b", rank=4, seed=1, ensure_weight_tying=True)

    assert plain.digest == tied_without_embeddings.digest == OLD_DIGEST
