"""An adapter merged into a new base: equal to PEFT, loadable by transformers and by us, whole or not there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from loraplex_engine.artifact import ArtifactError
from loraplex_engine.errors import ModelError
from loraplex_engine.merge import EMBEDDING_WEIGHT, HEAD_WEIGHT, main, merge
from loraplex_engine.model.config import ModelConfig
from loraplex_engine.model.loading import load_decoder
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from tests.support.adapter_files import make_adapter
from tests.support.peft_oracle import save_random_adapter
from tests.support.tiny_model import TinyShape, load_oracle, write_tiny_model

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    # PEFT's, of adapted embeddings on a tied base.
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
]

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
OUTSIDE = ["embed_tokens", "lm_head"]


def no_progress(what: str, done: float, total: float) -> None:
    """Shown to nobody."""


def make_base(folder: Path, **shape: Any) -> Path:
    write_tiny_model(folder, TinyShape(**shape))
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 130}}}))
    return folder


def make_delta(base: Path, folder: Path, **config: Any) -> Path:
    return save_random_adapter(
        load_oracle(base, torch.float32), folder, seed=3, size=0.2, **{"r": 4} | config
    )


@torch.inference_mode()
def logits_of(model: Any) -> Tensor:
    tokens = torch.tensor([[5, 77, 9, 130, 42, 3, 3, 64]])
    logits: Tensor = model(input_ids=tokens).logits[0]
    return logits


def with_adapter(base: Path, adapter: Path, dtype: torch.dtype = torch.float32) -> PeftModel:
    model = PeftModel.from_pretrained(load_oracle(base, dtype), adapter)
    return model.eval()


@pytest.mark.parametrize(
    ("is_tied", "config"),
    [
        (True, {"target_modules": LINEARS, "use_rslora": True}),
        (True, {"target_modules": LINEARS, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"up_proj": 3}}),
        (True, {"target_modules": ["v_proj"], "layers_to_transform": [1]}),
        (False, {"target_modules": [*LINEARS, *OUTSIDE]}),
        (False, {"target_modules": ["embed_tokens"]}),
    ],
    ids=str,
)  # fmt: skip
def test_weights_equal_pefts_merge(tmp_path: Path, is_tied: bool, config: dict[str, Any]) -> None:
    base = make_base(tmp_path / "base", is_tied=is_tied)
    adapter = make_delta(base, tmp_path / "adapter", **config)

    out = merge(adapter, base, tmp_path / "out", no_progress)

    theirs = with_adapter(base, adapter).merge_and_unload().state_dict()
    ours = load_oracle(out, torch.float32).state_dict()
    assert ours.keys() == theirs.keys()
    changed = 0
    original = load_oracle(base, torch.float32).state_dict()
    for name, weight in ours.items():
        torch.testing.assert_close(weight, theirs[name], rtol=1e-6, atol=1e-6)
        changed += not torch.equal(weight, original[name])
    assert changed > 0
    assert ModelConfig.from_folder(out).is_tied is is_tied


def test_in_the_bases_dtype_it_is_rounded_once(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", dtype=torch.bfloat16)
    adapter = make_delta(base, tmp_path / "adapter", target_modules=LINEARS)

    out = merge(adapter, base, tmp_path / "out", no_progress)

    exact = with_adapter(base, adapter).merge_and_unload().state_dict()
    for name, weight in load_file(out / "model.safetensors").items():
        assert weight.dtype == torch.bfloat16
        # fp32 sums in another order may fall to the other side of a rounding, by one step.
        torch.testing.assert_close(
            weight.float(), exact[name].to(torch.bfloat16).float(), rtol=2**-7, atol=1e-6
        )
        num_equal = (weight == exact[name].to(torch.bfloat16)).sum()
        assert num_equal > 0.99 * weight.numel()


@pytest.mark.parametrize(
    ("config", "is_tied_after"),
    [
        ({"target_modules": ["embed_tokens", "q_proj"]}, False),
        ({"target_modules": ["lm_head"]}, False),
        ({"target_modules": ["embed_tokens", "lm_head"]}, False),
        ({"target_modules": ["lm_head", "v_proj"], "ensure_weight_tying": True}, True),
        (
            {
                "target_modules": r".*embed_tokens|lm_head",
                "ensure_weight_tying": True,
                "alpha_pattern": {"lm_head": 1},
            },
            False,
        ),
    ],
    ids=str,
)
def test_a_tied_base_answers_as_with_the_adapter(
    tmp_path: Path, config: dict[str, Any], is_tied_after: bool
) -> None:
    """PEFT's own merge writes into the one weight that both use; the adapter unmerged is the oracle."""
    base = make_base(tmp_path / "base", is_tied=True)
    adapter = make_delta(base, tmp_path / "adapter", **config)
    wanted = logits_of(with_adapter(base, adapter))
    assert not torch.allclose(wanted, logits_of(load_oracle(base, torch.float32)), atol=1e-2)

    out = merge(adapter, base, tmp_path / "out", no_progress)

    torch.testing.assert_close(
        logits_of(load_oracle(out, torch.float32)), wanted, rtol=1e-4, atol=1e-4
    )
    assert ModelConfig.from_folder(out).is_tied is is_tied_after
    assert (HEAD_WEIGHT in load_file(out / "model.safetensors")) is not is_tied_after
    load_decoder(out, torch.float32)  # every tensor has a place, none is missing


def test_our_decoder_runs_it(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", is_tied=True)
    adapter = make_delta(base, tmp_path / "adapter", target_modules=[*LINEARS, *OUTSIDE])

    out = merge(adapter, base, tmp_path / "out", no_progress)

    decoder = load_decoder(out, torch.float32)
    expected: PreTrainedModel = load_oracle(out, torch.float32)
    x = torch.randn(4, 48, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        torch.testing.assert_close(decoder.lm_head(x), expected.lm_head(x), rtol=1e-5, atol=1e-5)


def test_a_base_in_shards_stays_so(tmp_path: Path) -> None:
    base = write_tiny_model(tmp_path / "base", TinyShape(), max_shard_size="60KB")
    (base / "tokenizer.json").write_text("{}")
    assert len(list(base.glob("*.safetensors"))) > 1
    adapter = make_delta(base, tmp_path / "adapter", target_modules=["embed_tokens", "q_proj"])

    out = merge(adapter, base, tmp_path / "out", no_progress)

    load_decoder(out, torch.float32)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"][HEAD_WEIGHT] == index["weight_map"][EMBEDDING_WEIGHT]
    torch.testing.assert_close(
        logits_of(load_oracle(out, torch.float32)),
        logits_of(with_adapter(base, adapter)),
        rtol=1e-4,
        atol=1e-4,
    )


def test_files_beside_the_weights_are_copied_and_nothing_else(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    (base / "modeling_evil.py").write_text("raise SystemExit")
    adapter = make_delta(base, tmp_path / "adapter", target_modules=["q_proj"])

    out = merge(adapter, base, tmp_path / "out", no_progress, base_name="tiny")

    names = {path.name for path in out.iterdir()}
    assert {"config.json", "tokenizer.json", "generation_config.json"} <= names
    assert "modeling_evil.py" not in names
    assert (out / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    origin = json.loads((out / "loraplex_merge.json").read_text())
    assert origin["base"] == "tiny"
    assert {path.stat().st_mode & 0o777 for path in out.iterdir()} == {0o644}
    assert origin["adapter_digest"].startswith("sha256:")


def test_an_existing_folder_is_replaced_only_by_force_and_only_a_model(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    adapter = make_delta(base, tmp_path / "adapter", target_modules=["q_proj"])
    out = merge(adapter, base, tmp_path / "out", no_progress)
    (out / "mine").write_text("x")

    with pytest.raises(ModelError, match="--force"):
        merge(adapter, base, out, no_progress)
    assert (out / "mine").exists()

    merge(adapter, base, out, no_progress, force=True)
    assert not (out / "mine").exists()

    documents = tmp_path / "documents"
    documents.mkdir()
    (documents / "thesis").write_text("x")
    with pytest.raises(ModelError, match="not a model folder"):
        merge(adapter, base, documents, no_progress, force=True)
    assert (documents / "thesis").exists()


def test_a_merge_that_fails_leaves_nothing(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", dtype=torch.float16)
    before = {path.name for path in tmp_path.iterdir()}
    shape = json.loads((base / "config.json").read_text())
    adapter = make_delta(
        base, tmp_path / "adapter", target_modules=["q_proj"], lora_alpha=10_000_000
    )

    with pytest.raises(ModelError, match="does not fit float16"):
        merge(adapter, base, tmp_path / "out", no_progress)

    assert {path.name for path in tmp_path.iterdir()} == before | {"adapter"}
    assert shape["dtype"] == "float16"


def test_an_adapter_of_another_base_is_refused(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    make_adapter(tmp_path / "adapter", linears=["q_proj"])

    with pytest.raises(ArtifactError, match="another base"):
        merge(tmp_path / "adapter", base, tmp_path / "out", no_progress)


def test_the_command_says_what_went_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = make_base(tmp_path / "base")
    adapter = make_delta(base, tmp_path / "adapter", target_modules=["q_proj"])
    arguments = [str(adapter), "--model", str(base), "--out", str(tmp_path / "out")]

    assert main(arguments) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'out'}\n"
    assert main(arguments) == 1
    assert "exists" in capsys.readouterr().err
    assert main([*arguments, "--force"]) == 0
    (adapter / "adapter_config.json").write_text("{}")
    assert main([*arguments, "--force"]) == 1
    assert "peft_type" in capsys.readouterr().err
