"""The config's matching rules are PEFT's, for any config: which modules, which rank, which scale."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loraplex_engine.artifact import (
    TENSORS_FILE,
    AdapterLimits,
    ArtifactError,
    ModelShape,
    check_fits,
    parse_adapter_config,
    read_adapter,
)
from peft import LoraConfig, get_peft_model
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key
from safetensors.torch import load_file, save_file

from tests.support.adapter_files import TINY_SHAPE, lora_config
from tests.support.peft_oracle import save_random_adapter
from tests.support.tiny_model import TinyShape, load_oracle, write_tiny_model

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

# What PEFT itself can merge into a base of its own.
MERGEABLE = {
    f"adapter_config.{name}"
    for name in ("use_dora", "modules_to_save", "bias", "lora_bias", "trainable_token_indices")
}
MODULES = [
    "model.embed_tokens",
    "lm_head",
    *(
        f"model.layers.{layer}.{linear}"
        for layer in range(12)
        for linear in TINY_SHAPE.linear_shapes()
    ),
]

NAMES = st.sampled_from(
    [
        "q_proj",
        "v_proj",
        "proj",
        "self_attn.k_proj",
        "attn.k_proj",
        "mlp.up_proj",
        "model.layers.1.mlp.down_proj",
        "layers.11.self_attn.o_proj",
        "1.mlp.gate_proj",
        "lm_head",
        "embed_tokens",
        "model.embed_tokens",
    ]
)
REGEXES = st.sampled_from(
    [
        r".*\.[qv]_proj",
        r"model\.layers\.(1|3|11)\.self_attn\.(q|o)_proj",
        r".*mlp.*",
        r".*up_proj|.*down_proj",
        r"q_proj",
        r"model\.layers\.\d\.mlp\.gate_proj",
        r".*(embed_tokens|lm_head)",
        r"lm_head",
    ]
)
PATTERNS = st.sampled_from(
    [
        "q_proj",
        "proj",
        ".*proj",
        r"layers\.1\.mlp\.down_proj",
        "layers.1.mlp.down_proj",
        r"1\.mlp\.down_proj",
        "(k|v)_proj",
        "[qk]_proj",
        "^model.layers.2.self_attn.q_proj",
        "mlp.up_proj",
        "up_proj|gate_proj",
        "model.layers.0.self_attn.q_proj$",
        "lm_head",
        "embed_tokens",
        ".*e.*",
    ]
)


@settings(max_examples=150, deadline=None)
@given(
    target_modules=st.one_of(st.lists(NAMES, min_size=1, max_size=4), REGEXES),
    exclude_modules=st.one_of(st.none(), st.lists(NAMES, max_size=2), REGEXES),
    layers=st.one_of(
        st.none(), st.integers(0, 12), st.lists(st.integers(0, 12), max_size=4, unique=True)
    ),
    layers_pattern=st.sampled_from([None, "layers", ["layers"], ["h", "layers"], "blocks"]),
    rank_pattern=st.dictionaries(PATTERNS, st.integers(1, 64), max_size=4),
    alpha_pattern=st.dictionaries(PATTERNS, st.integers(1, 64), max_size=4),
    use_rslora=st.booleans(),
)
def test_any_config_means_what_peft_says_it_means(
    target_modules: Any,
    exclude_modules: Any,
    layers: Any,
    layers_pattern: Any,
    rank_pattern: dict[str, int],
    alpha_pattern: dict[str, int],
    use_rslora: bool,
) -> None:
    fields = {
        "r": 8,
        "lora_alpha": 12,
        "target_modules": target_modules,
        "exclude_modules": exclude_modules,
        "layers_to_transform": layers,
        "layers_pattern": layers_pattern if layers is not None else None,
        "rank_pattern": rank_pattern,
        "alpha_pattern": alpha_pattern,
        "use_rslora": use_rslora,
    }
    raw = json.dumps(lora_config(**fields)).encode()
    try:
        theirs = LoraConfig(task_type="CAUSAL_LM", **fields)
    except ValueError:
        with pytest.raises(ArtifactError):
            parse_adapter_config(raw, limits=AdapterLimits())
        return
    ours = parse_adapter_config(raw, limits=AdapterLimits())

    for module in MODULES:
        # PEFT's answer for an excluded module is an object that is false.
        assert ours.targets(module) == bool(check_target_module_exists(theirs, module)), module
        rank = theirs.rank_pattern.get(get_pattern_key(theirs.rank_pattern, module), theirs.r)
        alpha = theirs.alpha_pattern.get(
            get_pattern_key(theirs.alpha_pattern, module), theirs.lora_alpha
        )
        assert ours.rank_of(module) == rank, module
        assert ours.scale_of(module) == alpha / (math.sqrt(rank) if use_rslora else rank), module


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), TinyShape())


def test_what_peft_saves_is_read_whole(model_dir: Path, tmp_path: Path) -> None:
    base = load_oracle(model_dir, torch.float32)
    folder = save_random_adapter(
        base,
        tmp_path / "a",
        seed=0,
        size=0.1,
        r=8,
        target_modules="all-linear",
        rank_pattern={"down_proj": 3},
        use_rslora=True,
    )

    artifact = read_adapter(folder, limits=AdapterLimits())

    fit = check_fits(artifact, ModelShape.from_config_json(model_dir / "config.json"))
    assert fit.matched_modules == fit.total_modules == 21
    assert {str(m): p.rank for m, p in artifact.pairs.items()} == {
        str(m): 3 if m.linear == "mlp.down_proj" else 8 for m in artifact.pairs
    }


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"use_dora": True}, "adapter_config.use_dora"),
        ({"modules_to_save": ["lm_head"]}, "adapter_config.modules_to_save"),
        ({"bias": "lora_only"}, "adapter_config.bias"),
        ({"lora_bias": True}, "adapter_config.lora_bias"),
        ({"trainable_token_indices": [1, 2]}, "adapter_config.trainable_token_indices"),
        ({"layer_replication": [(0, 2), (1, 3)]}, "adapter_config.layer_replication"),
        ({"init_lora_weights": "olora"}, "adapter_config.init_lora_weights"),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_features_not_served_are_refused_as_peft_saves_them(
    model_dir: Path, tmp_path: Path, config: dict[str, Any], field: str
) -> None:
    base = load_oracle(model_dir, torch.float32)
    model = get_peft_model(
        base, LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"], **config)
    )
    model.save_pretrained(tmp_path / "a")
    (tmp_path / "a" / "README.md").unlink()

    with pytest.raises(ArtifactError) as caught:
        read_adapter(tmp_path / "a", limits=AdapterLimits())

    assert caught.value.field == field
    advice = "merge_and_unload" if field in MERGEABLE else "rain"
    assert advice in caught.value.remedy or "onvert" in caught.value.remedy


@pytest.mark.parametrize(
    ("config", "modules"),
    [
        ({"target_modules": ["embed_tokens", "q_proj"]}, {"embed_tokens", "q_proj"}),
        ({"target_modules": ["lm_head"]}, {"lm_head"}),
        ({"target_modules": ["embed_tokens", "lm_head"]}, {"embed_tokens", "lm_head"}),
        ({"target_modules": r".*(embed_tokens|lm_head)"}, {"embed_tokens", "lm_head"}),
        (
            {"target_modules": ["lm_head", "q_proj"], "ensure_weight_tying": True},
            {"embed_tokens", "lm_head", "q_proj"},
        ),
        (
            {"target_modules": ["embed_tokens"], "ensure_weight_tying": True},
            {"embed_tokens", "lm_head"},
        ),
        (
            {"target_modules": r".*(lm_head|v_proj)", "ensure_weight_tying": True},
            {"embed_tokens", "lm_head", "v_proj"},
        ),
    ],
    ids=lambda value: str(sorted(value)) if isinstance(value, set) else str(value),
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_adapted_embeddings_are_read_as_peft_saves_them(
    model_dir: Path, tmp_path: Path, config: dict[str, Any], modules: set[str]
) -> None:
    """On a tied base: without ensure_weight_tying each is adapted for itself, with it both are."""
    base = load_oracle(model_dir, torch.float32)
    folder = save_random_adapter(base, tmp_path / "a", seed=0, size=0.1, r=4, **config)

    artifact = read_adapter(folder, limits=AdapterLimits())

    check_fits(artifact, ModelShape.from_config_json(model_dir / "config.json"))
    assert set(artifact.target_modules) == modules
    assert artifact.config.is_tying is bool(config.get("ensure_weight_tying"))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_tied_pair_must_be_one(model_dir: Path, tmp_path: Path) -> None:
    """PEFT keeps one of two that differ, whichever it loads last."""
    folder = save_random_adapter(
        load_oracle(model_dir, torch.float32),
        tmp_path / "a",
        seed=0,
        size=0.1,
        r=4,
        target_modules=["lm_head"],
        ensure_weight_tying=True,
    )
    shape = ModelShape.from_config_json(model_dir / "config.json")
    tensors = load_file(folder / TENSORS_FILE)
    name = "base_model.model.lm_head.lora_A.weight"

    save_file({**tensors, name: tensors[name] + 1e-3}, folder / TENSORS_FILE)
    with pytest.raises(ArtifactError, match="not the embedding's pair transposed"):
        check_fits(read_adapter(folder, limits=AdapterLimits()), shape)

    kept = {key: tensor for key, tensor in tensors.items() if "lm_head" not in key}
    save_file(kept, folder / TENSORS_FILE)
    with pytest.raises(ArtifactError, match="targets lm_head, but the file has no tensors"):
        check_fits(read_adapter(folder, limits=AdapterLimits()), shape)

    save_file(tensors, folder / TENSORS_FILE)
    artifact = read_adapter(folder, limits=AdapterLimits())
    with pytest.raises(ArtifactError, match="has a weight of its own"):
        check_fits(artifact, msgspec.structs.replace(shape, is_tied=False))


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_copy_of_the_base_that_peft_adds_must_be_one(
    tmp_path: Path, target: str, is_tied: bool
) -> None:
    """save_pretrained adds it by default; it would be loaded over the base's own weight."""
    base_dir = write_tiny_model(
        tmp_path / "base", TinyShape(is_tied=is_tied, dtype=torch.bfloat16), max_shard_size="40KB"
    )
    base = load_oracle(base_dir, torch.float32)
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=[target]))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path / "a")
    model.save_pretrained(tmp_path / "b", save_embedding_layers=False)
    for name in ("a", "b"):
        (tmp_path / name / "README.md").unlink()
    tensors = load_file(tmp_path / "a" / TENSORS_FILE)
    (copy,) = (name for name in tensors if "base_layer" in name)
    shape = ModelShape.from_config_json(base_dir / "config.json")

    artifact, without = (
        read_adapter(tmp_path / name, limits=AdapterLimits()) for name in ("a", "b")
    )
    check_fits(artifact, shape, base=base_dir)
    assert artifact.digest == without.digest
    assert artifact.tensors.keys() == without.tensors.keys()
    assert list(artifact.base_copies) == [copy]

    for changed in (tensors[copy].clone(), tensors[copy][:-1].clone()):
        changed[-1, -1] += 0.25
        save_file({**tensors, copy: changed}, tmp_path / "a" / TENSORS_FILE)
        stale = read_adapter(tmp_path / "a", limits=AdapterLimits())
        with pytest.raises(ArtifactError, match="has other ones") as caught:
            check_fits(stale, shape, base=base_dir)
        assert "save_embedding_layers=False" in caught.value.remedy


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_freshly_made_adapter_has_no_effect(model_dir: Path, tmp_path: Path) -> None:
    base = load_oracle(model_dir, torch.float32)
    get_peft_model(
        base, LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"])
    ).save_pretrained(tmp_path / "a")
    (tmp_path / "a" / "README.md").unlink()

    with pytest.raises(ArtifactError, match="no effect"):
        read_adapter(tmp_path / "a", limits=AdapterLimits())
