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
        *(
            # Against llama.cpp's Q4_1; the rest is the same code.
            Loraplex(
                f"loraplex-{kind}",
                f"Loraplex {kind}",
                {"quantization": kind},
                only=("mixed", "single"),
            )
            for kind in ("int8", "int4")
        ),
        LlamaCpp("bf16"),
        LlamaCpp("q4_1"),
        TransformersPeft("batch"),
        TransformersPeft("one"),
        VllmCpu(),
    ]
