"""Workload files: one JSON object a line, replayable against any OpenAI-compatible server.

    {"id": 0, "model": "bench-03", "prompt": [token ids], "max_tokens": 64, "tenant": "bench"}

Prompts are token ids so that every server and peer sees exactly the same tokens, and so that prompt
lengths are exact. Ids are drawn from pieces of real sentences, not uniformly: random ids make
byte-fallback text and unusually flat distributions. No two prompts (or system prompts) of a file begin
with the same token, so that nothing is shared between requests but what a workload says is.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tokenizers import Tokenizer

DEFAULT_TENANT = "bench"
_SENTENCES = (
    "The harbour was quiet in the early morning, and only the gulls were awake.",
    "A good sorting algorithm keeps equal elements in their original order.",
    "She asked the engineer why the bridge had been closed for repairs.",
    "Water boils at a lower temperature on a mountain than it does at sea level.",
    "The committee will meet again in spring to decide on the new budget.",
    "Plants turn sunlight into sugar, and animals live from what they store.",
    "He wrote the letter twice, because the first version sounded too cold.",
    "In the market square, farmers sold apples, cheese and freshly baked bread.",
    "An operating system shares one processor among many running programs.",
    "The old map showed a road that nobody in the village could remember.",
)


@dataclass(frozen=True, slots=True)
class WorkItem:
    """One request of a workload."""

    id: int
    model: str
    prompt: list[int]
    max_tokens: int
    tenant: str = DEFAULT_TENANT


class PromptWriter:
    """Texts of exact lengths in tokens, the same for the same seed; each begins with another token."""

    def __init__(self, tokenizer_json: Path, seed: int) -> None:
        tokenizer = Tokenizer.from_file(str(tokenizer_json))
        self._rng = random.Random(seed)
        self._sentences = [
            tokenizer.encode(f" {text}", add_special_tokens=False).ids for text in _SENTENCES
        ]
        vocabulary = tokenizer.get_vocab(with_added_tokens=False)
        # Whole words with a space before them, as byte-level vocabularies write it.
        words = sorted(
            token_id
            for text, token_id in vocabulary.items()
            if len(text) > 3 and text[0] == "Ġ" and text[1:].isascii() and text[1:].isalpha()
        )
        # A vocabulary of another kind, or a tiny one of a test.
        self._openings = words if len(words) >= 4096 else sorted(vocabulary.values())
        self._rng.shuffle(self._openings)

    def write(self, num_tokens: int) -> list[int]:
        """A prompt that begins as none before it.

        Raises:
            ValueError: no token is left to begin with, or the length is below 1.
        """
        if num_tokens < 1:
            raise ValueError(f"num_tokens is {num_tokens}: a prompt has 1 token at least")
        if not self._openings:
            raise ValueError("more prompts than the vocabulary has tokens to begin them with")
        ids = [self._openings.pop()]
        while len(ids) < num_tokens:
            ids += self._rng.choice(self._sentences)
        return ids[:num_tokens]


def zipf_counts(num_models: int, num_requests: int, exponent: float = 1.0) -> list[int]:
    """How many of the requests each model gets: in proportion to 1 / position ** exponent.

    The exact shares, rounded by largest remainder (the earlier model first), not a draw: a file of 64
    requests then follows the law instead of one of its accidents.
    """
    weights = [1 / position**exponent for position in range(1, num_models + 1)]
    shares = [num_requests * weight / sum(weights) for weight in weights]
    counts = [int(share) for share in shares]
    by_remainder = sorted(range(num_models), key=lambda idx: counts[idx] - shares[idx])
    for idx in by_remainder[: num_requests - sum(counts)]:
        counts[idx] += 1
    return counts


def zipf_models(models: Sequence[str], num_requests: int, seed: int) -> list[str]:
    """The model of each request, the first of `models` the most popular, in an order that mixes them."""
    counts = zipf_counts(len(models), num_requests)
    chosen = [model for model, count in zip(models, counts, strict=True) for _ in range(count)]
    random.Random(seed).shuffle(chosen)
    return chosen


def write(items: Sequence[WorkItem], path: Path) -> None:
    """Save a workload, one JSON object a line."""
    path.write_text("".join(json.dumps(asdict(item)) + "\n" for item in items))


def read(path: Path) -> list[WorkItem]:
    """Load a workload that `write` saved."""
    return [WorkItem(**json.loads(line)) for line in path.read_text().splitlines() if line]


def digest(items: Sequence[WorkItem]) -> str:
    """What names this content: equal for equal files."""
    lines = "".join(json.dumps(asdict(item), sort_keys=True) + "\n" for item in items)
    return hashlib.sha256(lines.encode()).hexdigest()
