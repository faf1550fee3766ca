"""A tokenizer small enough to be made on the spot: one token per word."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from bench.workload import _SENTENCES


@pytest.fixture(scope="session")
def tokenizer_json(tmp_path_factory: pytest.TempPathFactory) -> Path:
    words = sorted({word for text in _SENTENCES for word in text.replace(".", " .").split()})
    words = [word.strip(",.") or "." for word in words] + [",", "[UNK]"]
    # As many more as the suite has prompts, since each begins with another token.
    vocabulary = {word: idx for idx, word in enumerate(dict.fromkeys(words))}
    vocabulary |= {f"w{n}": len(vocabulary) + n for n in range(600)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path
