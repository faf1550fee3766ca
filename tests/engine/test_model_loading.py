"""Reading a model folder: what is accepted, and that everything else is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from loraplex_engine.errors import ModelError
from loraplex_engine.model.config import ModelConfig
from loraplex_engine.model.loading import load_decoder, resolve_dtype
from safetensors.torch import load_file, save_file

from tests.support.tiny_model import TinyShape, write_tiny_model

WEIGHTS = "model.safetensors"
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path, TinyShape(num_layers=1, is_tied=False))


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


def edit_weights(folder: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


class TestConfig:
    def test_both_spellings_of_the_rope_base_are_read(self, folder: Path) -> None:
        edit_config(folder, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
        new = ModelConfig.from_folder(folder)
        edit_config(folder, rope_parameters=..., rope_theta=5e5)
        old = ModelConfig.from_folder(folder)

        assert new.rope_theta == old.rope_theta == 5e5

    def test_both_spellings_of_the_dtype_are_read(self, folder: Path) -> None:
        edit_config(folder, dtype=..., torch_dtype="bfloat16")

        assert ModelConfig.from_folder(folder).dtype == "bfloat16"

    def test_stop_ids_come_from_the_generation_config_first(self, folder: Path) -> None:
        (folder / "generation_config.json").write_text('{"eos_token_id": [9, 4]}')

        assert ModelConfig.from_folder(folder).eos_token_ids == (4, 9)

        (folder / "generation_config.json").unlink()

        assert ModelConfig.from_folder(folder).eos_token_ids == (2,)

    def test_ids_beyond_the_tokenizer_are_not_counted(self, folder: Path) -> None:
        tokenizer = {"model": {"vocab": {"a": 0, "b": 98}}, "added_tokens": [{"id": 99}]}
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))

        assert ModelConfig.from_folder(folder).num_token_ids == 100

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("architectures", ["GPT2LMHeadModel"]),
            ("architectures", None),
            ("hidden_act", "gelu"),
            ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4}),
            ("rope_parameters", {"rope_theta": "large"}),
            ("rope_scaling", {"type": "linear", "factor": 2}),
            ("sliding_window", 64),
            ("quantization_config", {"bits": 4}),
            ("pretraining_tp", 2),
            ("partial_rotary_factor", 0.5),
            ("num_key_value_heads", 4),
            ("head_dim", 7),
            ("vocab_size", 0),
            ("vocab_size", None),
            ("num_hidden_layers", "three"),
            ("tie_word_embeddings", "yes"),
            ("dtype", "float64"),
            ("rms_norm_eps", "small"),
            ("eos_token_id", "</s>"),
        ],
    )
    def test_an_unsupported_value_is_refused_by_field(
        self, folder: Path, field: str, value: object
    ) -> None:
        (folder / "generation_config.json").unlink()
        edit_config(folder, **{field: value})

        with pytest.raises(ModelError, match=field):
            ModelConfig.from_folder(folder)

    def test_a_window_that_is_off_or_never_reached_is_fine(self, folder: Path) -> None:
        edit_config(folder, sliding_window=64, use_sliding_window=False)
        ModelConfig.from_folder(folder)
        edit_config(folder, sliding_window=4096, use_sliding_window=...)
        ModelConfig.from_folder(folder)

    @pytest.mark.parametrize("text", ["{", "[]", "\udcff"])
    def test_malformed_json_names_the_file(self, folder: Path, text: str) -> None:
        (folder / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))

        with pytest.raises(ModelError, match=r"config\.json"):
            ModelConfig.from_folder(folder)

    def test_an_empty_folder_is_not_a_model(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match="not a model folder"):
            ModelConfig.from_folder(tmp_path)


class TestWeights:
    def test_a_missing_tensor_is_an_error(self, folder: Path) -> None:
        edit_weights(folder, lambda t: t.pop("model.layers.0.mlp.up_proj.weight"))

        with pytest.raises(ModelError, match=r"mlp\.up_proj\.weight is missing"):
            load_decoder(folder, torch.float32)

    def test_an_unused_tensor_is_an_error(self, folder: Path) -> None:
        edit_weights(folder, lambda t: t.update({"model.layers.1.extra": torch.ones(2)}))

        with pytest.raises(ModelError, match=r"no place .* model\.layers\.1\.extra"):
            load_decoder(folder, torch.float32)

    def test_a_bias_the_configuration_does_not_mention_is_an_error(self, folder: Path) -> None:
        name = "model.layers.0.self_attn.q_proj.bias"
        edit_weights(folder, lambda t: t.update({name: torch.ones(48)}))

        with pytest.raises(ModelError, match=name):
            load_decoder(folder, torch.float32)

    def test_frequencies_that_old_exports_stored_are_ignored(self, folder: Path) -> None:
        name = "model.layers.0.self_attn.rotary_emb.inv_freq"
        edit_weights(folder, lambda t: t.update({name: torch.ones(4)}))

        load_decoder(folder, torch.float32)

    @pytest.mark.parametrize(
        ("tensor", "message"),
        [(torch.ones(131, 47), "shape"), (torch.ones(131, 48, dtype=torch.int32), "dtype")],
    )
    def test_a_wrong_shape_or_dtype_is_an_error(
        self, folder: Path, tensor: torch.Tensor, message: str
    ) -> None:
        edit_weights(folder, lambda t: t.update({"model.embed_tokens.weight": tensor}))

        with pytest.raises(ModelError, match=f"embed_tokens.weight has {message}"):
            load_decoder(folder, torch.float32)

    def test_a_tied_model_may_carry_an_equal_head_but_no_other(self, folder: Path) -> None:
        edit_config(folder, tie_word_embeddings=True)
        edit_weights(
            folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()})
        )
        load_decoder(folder, torch.float32)
        edit_weights(folder, lambda t: t["lm_head.weight"].add_(1))

        with pytest.raises(ModelError, match="tie_word_embeddings"):
            load_decoder(folder, torch.float32)

    def test_a_truncated_file_is_an_error(self, folder: Path) -> None:
        data = (folder / WEIGHTS).read_bytes()
        (folder / WEIGHTS).write_bytes(data[: len(data) // 2])

        with pytest.raises(ModelError, match=WEIGHTS):
            load_decoder(folder, torch.float32)

    def test_no_weights_is_an_error(self, folder: Path) -> None:
        (folder / WEIGHTS).unlink()

        with pytest.raises(ModelError, match="holds neither"):
            load_decoder(folder, torch.float32)

    def test_only_known_ids_get_logits(self, folder: Path) -> None:
        tokenizer = {"model": {"vocab": {"a": 0, "b": 99}}}
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))

        assert load_decoder(folder, torch.float32).lm_head.out_features == 100


class TestShards:
    @pytest.fixture
    def sharded(self, tmp_path: Path) -> Path:
        folder = write_tiny_model(tmp_path, TinyShape(), max_shard_size="60KB")
        assert len(list(folder.glob("*.safetensors"))) > 2
        return folder

    def edit_index(self, folder: Path, name: str, file_name: str) -> None:
        path = folder / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        index["weight_map"][name] = file_name
        path.write_text(json.dumps(index))

    def test_all_files_are_read(self, sharded: Path) -> None:
        assert len(load_decoder(sharded, torch.float32).layers) == 3

    def test_a_missing_file_is_an_error(self, sharded: Path) -> None:
        victim = sorted(sharded.glob("*.safetensors"))[0]
        victim.unlink()

        with pytest.raises(ModelError, match=victim.name):
            load_decoder(sharded, torch.float32)

    def test_an_index_that_promises_more_is_an_error(self, sharded: Path) -> None:
        file_name = sorted(sharded.glob("*.safetensors"))[0].name
        self.edit_index(sharded, "model.extra", file_name)

        with pytest.raises(ModelError, match=r"model\.extra"):
            load_decoder(sharded, torch.float32)

    def test_a_path_in_a_file_name_is_an_error(self, sharded: Path) -> None:
        self.edit_index(sharded, "model.norm.weight", "../model.safetensors")

        with pytest.raises(ModelError, match="not a plain file name"):
            load_decoder(sharded, torch.float32)

    @pytest.mark.parametrize("text", ["{}", "{", '{"weight_map": 3}'])
    def test_a_malformed_index_is_an_error(self, sharded: Path, text: str) -> None:
        (sharded / "model.safetensors.index.json").write_text(text)

        with pytest.raises(ModelError, match="malformed"):
            load_decoder(sharded, torch.float32)


def test_the_dtype_auto_is_one_this_cpu_is_fast_in() -> None:
    assert resolve_dtype("auto") in (torch.float32, torch.bfloat16)
    assert resolve_dtype("bfloat16") is torch.bfloat16
