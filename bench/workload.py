"""Workload files: one JSON object a line, replayable against any OpenAI-compatible server.

    {"id": 0, "model": "bench-03", "prompt": [token ids], "max_tokens": 64}

Prompts are token ids so that every server and peer sees exactly the same tokens, and so that prompt
lengths are exact. Ids are drawn from pieces of real sentences, not uniformly: random ids make
byte-fallback text and unusually flat distributions.
"""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path

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


def make(
    tokenizer_json: Path,
    models: list[str],
    *,
    num_requests: int,
    min_prompt_tokens: int,
    max_prompt_tokens: int,
    max_tokens: int,
    seed: int,
) -> list[WorkItem]:
    """Requests that go round `models`, with prompt lengths uniform in the given range."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_json))
    rng = random.Random(seed)
    items = []
    for idx in range(num_requests):
        length = rng.randint(min_prompt_tokens, max_prompt_tokens)
        ids: list[int] = []
        while len(ids) < length:
            ids += tokenizer.encode(" " + rng.choice(_SENTENCES), add_special_tokens=False).ids
        items.append(WorkItem(idx, models[idx % len(models)], ids[:length], max_tokens))
    return items


def write(items: list[WorkItem], path: Path) -> None:
    """Save a workload, one JSON object a line."""
    path.write_text("".join(json.dumps(asdict(item)) + "\n" for item in items))


def read(path: Path) -> list[WorkItem]:
    """Load a workload that `write` saved."""
    return [WorkItem(**json.loads(line)) for line in path.read_text().splitlines() if line]
