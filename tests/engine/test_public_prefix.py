"""The file of public prefixes: both kinds of entries, and every way to get it wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from loraplex_engine.config import EngineConfig
from loraplex_engine.errors import ConfigError
from loraplex_engine.kv import public_prefix
from loraplex_engine.kv.public_prefix import load_public_prefixes
from loraplex_engine.kv.setup import open_prefix_cache
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """A tokenizer of few words, with a special token and one that is added to every text."""
    words = {word: index for index, word in enumerate(("you", "are", "kind", "<s>", "<user>"))}
    tokenizer = Tokenizer(WordLevel(words, unk_token="you"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens(["<s>", "<user>"])
    (tmp_path / "model").mkdir()
    tokenizer.save(str(tmp_path / "model" / "tokenizer.json"))
    return tmp_path / "model"


def load(model_dir: Path, content: object) -> tuple[tuple[int, ...], ...]:
    path = model_dir.parent / "public.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return load_public_prefixes(path, model_dir=model_dir, vocab_size=8, block_size=4)


def test_texts_and_token_ids_side_by_side(model_dir: Path) -> None:
    prefixes = load(model_dir, ["<s> you are kind <user>", [1, 2, 3, 4, 5, 6, 7]])

    assert prefixes == ((3, 0, 1, 2, 4), (1, 2, 3, 4, 5, 6, 7))


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"[", "not a JSON list of texts"),
        ({"text": "x"}, "not a JSON list of texts"),
        ([{"text": "x"}], "not a JSON list of texts"),
        ([[1, 2, 3, "4"]], "not a JSON list of texts"),
        ([], "declares nothing"),
        ([[1, 2, 3, 4], [1, 2, 3]], "entry 1 has 3 tokens; only whole blocks of 4"),
        (["you are kind"], "entry 0 has 3 tokens"),
        ([[1, 2, 3, 8]], "entry 0 holds token id 8; ids of this model are 0 to 7"),
        ([[1, 2, 3, -1]], "entry 0 holds token id -1"),
    ],
)
def test_a_wrong_file_is_refused_with_a_remedy(
    model_dir: Path, content: object, match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        load(model_dir, content)


def remove_tokenizer(model_dir: Path) -> None:
    (model_dir / "tokenizer.json").unlink()


def damage_tokenizer(model_dir: Path) -> None:
    (model_dir / "tokenizer.json").write_text("{}")


@pytest.mark.parametrize("damage", [remove_tokenizer, damage_tokenizer])
def test_texts_need_the_models_tokenizer_and_token_ids_do_not(
    model_dir: Path, damage: Callable[[Path], None]
) -> None:
    damage(model_dir)

    assert load(model_dir, [[1, 2, 3, 4]]) == ((1, 2, 3, 4),)
    with pytest.raises(ConfigError, match=r"texts need .*tokenizer\.json.*; give token ids"):
        load(model_dir, ["you are kind you"])


def test_a_missing_or_huge_file_is_refused(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_public_prefixes(
            model_dir / "none.json", model_dir=model_dir, vocab_size=8, block_size=4
        )
    monkeypatch.setattr(public_prefix, "MAX_FILE_BYTES", 10)
    with pytest.raises(ConfigError, match="more than 10 bytes"):
        load(model_dir, [[1, 2, 3, 4, 5]])


def test_the_settings_reach_the_cache(model_dir: Path) -> None:
    path = model_dir.parent / "public.json"
    path.write_text("[[1, 2, 3, 4, 5]]")
    config = EngineConfig(
        model_dir=model_dir,
        base_model="tiny",
        block_size=4,
        public_prefix_file=path,
        prefix_cache_tenant_share=0.25,
        num_blocks=8,
    )
    sizes = config.sizes(block_bytes=256, max_position_embeddings=32)

    cache = open_prefix_cache(config, sizes, model_fingerprint="m", kv_format="f", vocab_size=8)

    assert cache is not None
    chain = cache.hasher.chain([1, 2, 3, 4, 5], owner="t", salt=b"s", adapter_digest=None)
    assert chain.num_public == 1
    assert cache._share(cache._party("t")) == 2.0


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"prefix_cache_tenant_share": 0.0}, "prefix_cache_tenant_share is 0.0"),
        ({"prefix_cache_tenant_share": 1.5}, "prefix_cache_tenant_share is 1.5"),
        ({"prefix_cache_tenant_share": float("nan")}, "prefix_cache_tenant_share is nan"),
        ({"prefix_cache": False, "public_prefix_file": Path("x")}, "which is off"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, object], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        EngineConfig(model_dir=Path("x"), base_model="tiny", **settings)  # type: ignore[arg-type] # by name
