"""The contenders of `make bench`, ours first; `--peers` chooses among the others by name."""

from __future__ import annotations

from bench.peers.base import Contender
from bench.peers.llama_cpp import LlamaCpp
from bench.peers.loraplex import Loraplex
from bench.peers.transformers_peft import TransformersPeft
from bench.peers.vllm_cpu import VllmCpu


def all_contenders() -> list[Contender]:
    """In the order of the table."""
    return [
        Loraplex(),
        LlamaCpp("bf16"),
        LlamaCpp("q4_1"),
        TransformersPeft("batch"),
        TransformersPeft("one"),
        VllmCpu(),
    ]
