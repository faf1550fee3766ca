"""The workloads of `make bench`: what each asks for, and how many at a time.

    mixed    64 requests, prompts 16 to 256, 64 output tokens; the base and 32 adapters of ranks 8 to 64,
             Zipf popularity with the base as the most popular; 16 in flight; no two share a prefix
    base     the same prompts, all on the base model, with LoRA switched off where it can be
    prefix   8 tenants, each with its own adapter and a system prompt of 512 tokens; 64 requests
    single   prompt 128, output 128, one stream with an adapter of rank 16
    prefill  1,024 tokens of prompt and one of output, one at a time, on the base
    scale    concurrency 1, 4, 16, 64 x adapters 1, 8, 32, 128; then 2,000 registered (bench/scale.py)

`--quick` keeps the shape and takes fewer requests and tokens: for trying out, its figures count for nothing.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.workload import PromptWriter, WorkItem, zipf_models

BASE_MODEL = "smollm2-135m"
NUM_ADAPTERS = 32
RANKS = (
    16,
    64,
    8,
    32,
)  # adapter n has RANKS[n % 4]: the popular ones are neither all small nor all large
NUM_TENANTS = 8
SYSTEM_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Workload:
    """One file and how it is replayed."""

    name: str
    title: str
    items: tuple[WorkItem, ...]
    concurrency: int
    counts: str = "output"  # which tokens its speed is counted in: "output" or "prompt"
    has_adapters: bool = True  # False: servers start without LoRA

    @property
    def models(self) -> list[tuple[str, str]]:
        """(tenant, model) of each adapter that is asked for, sorted."""
        return sorted({(i.tenant, i.model) for i in self.items if i.model != BASE_MODEL})

    @property
    def longest(self) -> int:
        """Most tokens of one request, prompt and output."""
        return max(len(item.prompt) + item.max_tokens for item in self.items)


def adapter_name(index: int) -> str:
    """Name of an adapter and of its folder."""
    return f"bench-{index:04d}"


def adapter_rank(index: int) -> int:
    """Its rank."""
    return RANKS[index % len(RANKS)]


def rank_of(name: str) -> int:
    """The rank of the adapter with this name."""
    return adapter_rank(int(name.rsplit("-", 1)[-1]))


def mixed(tokenizer_json: Path, *, is_quick: bool = False) -> Workload:
    """Many adapters at once, nothing shared."""
    num_requests, max_tokens = (16, 8) if is_quick else (64, 64)
    longest = 64 if is_quick else 256
    models = [BASE_MODEL, *map(adapter_name, range(NUM_ADAPTERS))]
    writer = PromptWriter(tokenizer_json, seed=0)
    rng = random.Random(0)
    items = tuple(
        WorkItem(idx, model, writer.write(rng.randint(16, longest)), max_tokens)
        for idx, model in enumerate(zipf_models(models, num_requests, seed=0))
    )
    title = (
        f"{num_requests} requests, prompts 16-{longest}, {max_tokens} output tokens, "
        f"{NUM_ADAPTERS} adapters (rank 8-64, Zipf) and the base, 16 in flight"
    )
    return Workload("mixed", title, items, concurrency=16)


def base(tokenizer_json: Path, *, is_quick: bool = False) -> Workload:
    """The prompts of `mixed` without adapters."""
    like = mixed(tokenizer_json, is_quick=is_quick)
    items = tuple(WorkItem(i.id, BASE_MODEL, i.prompt, i.max_tokens) for i in like.items)
    title = "the same prompts, all on the base model, servers without LoRA, 16 in flight"
    return Workload("base", title, items, concurrency=16, has_adapters=False)


def prefix(tokenizer_json: Path, *, is_quick: bool = False) -> Workload:
    """Tenants whose requests begin with their own long system prompt."""
    per_tenant, max_tokens = (2, 8) if is_quick else (8, 64)
    writer = PromptWriter(tokenizer_json, seed=1)
    rng = random.Random(1)
    systems = [writer.write(SYSTEM_TOKENS) for _ in range(NUM_TENANTS)]
    items = []
    for idx in range(NUM_TENANTS * per_tenant):
        tenant = idx % NUM_TENANTS
        prompt = systems[tenant] + writer.write(rng.randint(16, 64))
        items.append(
            WorkItem(idx, adapter_name(tenant), prompt, max_tokens, tenant=f"bench-tenant-{tenant}")
        )
    title = (
        f"{len(items)} requests of {NUM_TENANTS} tenants, each with an adapter and a system prompt of "
        f"{SYSTEM_TOKENS} tokens, questions 16-64, {max_tokens} output tokens, 16 in flight"
    )
    return Workload("prefix", title, tuple(items), concurrency=16)


def single(tokenizer_json: Path, *, is_quick: bool = False) -> Workload:
    """One stream with an adapter."""
    num_requests, max_tokens = (1, 16) if is_quick else (4, 128)
    writer = PromptWriter(tokenizer_json, seed=2)
    items = tuple(
        WorkItem(idx, adapter_name(0), writer.write(128), max_tokens) for idx in range(num_requests)
    )
    title = (
        f"one stream, an adapter of rank {adapter_rank(0)}, prompt 128, {max_tokens} output tokens"
    )
    return Workload("single", title, items, concurrency=1)


def prefill(tokenizer_json: Path, *, is_quick: bool = False) -> Workload:
    """Prompts alone."""
    num_requests, length = (1, 256) if is_quick else (4, 1024)
    writer = PromptWriter(tokenizer_json, seed=3)
    items = tuple(WorkItem(idx, BASE_MODEL, writer.write(length), 1) for idx in range(num_requests))
    title = f"prompts of {length} tokens, 1 output token, one at a time, the base model"
    return Workload("prefill", title, items, concurrency=1, counts="prompt")


MAKERS = {"mixed": mixed, "base": base, "prefix": prefix, "single": single, "prefill": prefill}
SCALE = "scale"
NAMES = (*MAKERS, SCALE)


def make(names: Sequence[str], tokenizer_json: Path, *, is_quick: bool = False) -> list[Workload]:
    """The workloads of these names, in the suite's order; `scale` is made by its own module."""
    return [maker(tokenizer_json, is_quick=is_quick) for n, maker in MAKERS.items() if n in names]
