"""`python -m bench.prefix`: time to the first token, cold and warm, on the engine's core without HTTP.

One round is a pair: with an empty prefix cache a request is answered (cold), then another that shares its
system prompt and asks something else (warm). Both compute the same number of tokens if nothing is found;
pairs see the same drift of the machine, and the figures are medians over them. In each round the warm
request is also answered with an empty cache: the text must be the same. Exits 1 if it is not, or if
warm is not at most a tenth of cold.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from loraplex_engine.config import EngineConfig
from loraplex_engine.numerics_environment import prepare_numerics
from loraplex_engine.protocol import Generate, SamplingParams, Usage
from tokenizers import Tokenizer

if TYPE_CHECKING:
    from loraplex_engine.core import EngineCore

TARGET = 0.1  # warm over cold
_RULE = "Rule {n}: answer in one short sentence, name the {noun}, and never mention the weather. "
_NOUNS = [
    "river",
    "harbour",
    "lantern",
    "orchard",
    "violin",
    "compass",
    "glacier",
    "meadow",
    "engine",
    "library",
]


@dataclass(frozen=True)
class Pair:
    """One round."""

    cold_s: float
    warm_s: float
    prompt_tokens: int
    cached_tokens: int
    is_same_text: bool


def _prompts(tokenizer: Tokenizer, system_tokens: int, count: int) -> list[list[int]]:
    """Chats as SmolLM2's template writes them: one system prompt of exactly that length, questions."""
    rules = "".join(
        _RULE.format(n=n, noun=_NOUNS[n % len(_NOUNS)]) for n in range(system_tokens // 8)
    )
    system = tokenizer.encode(f"<|im_start|>system\n{rules}").ids[:system_tokens]
    assert len(system) == system_tokens
    return [
        system
        + tokenizer.encode(
            f"<|im_end|>\n<|im_start|>user\nWhat is a {_NOUNS[n % 10]}, said in {n + 20} words?"
            "<|im_end|>\n<|im_start|>assistant\n"
        ).ids
        for n in range(count)
    ]


class _Asker:
    """Runs one request at a time to its end."""

    def __init__(self, core: EngineCore, max_tokens: int) -> None:
        self._core = core
        self._max_tokens = max_tokens
        self._count = 0

    def ask(self, prompt: list[int]) -> tuple[float, list[int], Usage]:
        """Seconds to the first token, the text, and what it cost."""
        self._count += 1
        request = Generate(
            request_id=f"r{self._count}",
            attempt=0,
            lease_token=0,
            tenant_id="bench",
            tenant_salt=b"bench",
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=self._max_tokens, temperature=0.0, ignore_eos=True),
        )
        started_at = time.perf_counter()
        self._core.add(request)
        first_s, usage = 0.0, None
        text: list[int] = []
        while self._core.has_work():
            for event in self._core.step():
                if event.token_ids and not text:
                    first_s = time.perf_counter() - started_at
                text += event.token_ids
                usage = event.usage or usage
        assert usage is not None
        return first_s, text, usage


def run(core: EngineCore, prompts: list[list[int]], max_tokens: int) -> list[Pair]:
    """One pair for each two prompts."""
    asker = _Asker(core, max_tokens)
    pairs = []
    for first, second in zip(prompts[0::2], prompts[1::2], strict=True):
        core.forget_cached()
        _, alone, _ = asker.ask(second)
        core.forget_cached()
        cold_s, _, cold = asker.ask(first)
        warm_s, text, warm = asker.ask(second)
        assert cold.cached_tokens == 0
        pairs.append(Pair(cold_s, warm_s, warm.prompt_tokens, warm.cached_tokens, text == alone))
    return pairs


def main() -> None:
    """Command line."""
    cache = Path(os.environ.get("LORAPLEX_CACHE_DIR", "~/.cache/loraplex")).expanduser()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=cache / "models" / "smollm2-135m")
    parser.add_argument("--system-tokens", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=7, help="counted; one more comes before")
    parser.add_argument("--max-tokens", type=int, default=8)
    parser.add_argument("--out", type=Path, help="write all pairs there, as JSON")
    args = parser.parse_args()
    # As the server does: beside other processes, threads that spin at a barrier take each other's time.
    prepare_numerics()
    from loraplex_engine.build import build_engine

    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    prompts = _prompts(tokenizer, args.system_tokens, 2 * (args.rounds + 1))
    core = build_engine(EngineConfig(model_dir=args.model, base_model="smollm2-135m"))
    pairs = run(core, prompts, args.max_tokens)[1:]
    cold_s = statistics.median(pair.cold_s for pair in pairs)
    warm_s = statistics.median(pair.warm_s for pair in pairs)
    ratio = statistics.median(pair.warm_s / pair.cold_s for pair in pairs)
    is_same = all(pair.is_same_text for pair in pairs)
    sys.stdout.write(
        f"prompt {pairs[0].prompt_tokens} tokens, of which {pairs[0].cached_tokens} found; time to"
        f" the first token, medians of {len(pairs)} pairs:\n"
        f"cold {cold_s * 1000:.1f} ms, warm {warm_s * 1000:.1f} ms, warm / cold {ratio:.3f}"
        f" (at most {TARGET}); texts {'equal' if is_same else 'DIFFER'}\n"
    )
    if args.out is not None:
        args.out.write_text(json.dumps([asdict(pair) for pair in pairs], indent=2))
    sys.exit(0 if is_same and ratio <= TARGET else 1)


if __name__ == "__main__":
    main()
