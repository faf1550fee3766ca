"""Opens the grammar compiler that an engine's settings ask for."""

from __future__ import annotations

import structlog

from loraplex_engine.config import EngineConfig
from loraplex_engine.structured.compiler import CompilerLimits, GrammarCompiler
from loraplex_engine.structured.tokenizer import find_tokenizer

log = structlog.get_logger(__name__)


def open_grammars(
    config: EngineConfig, vocab_size: int, eos_token_ids: frozenset[int]
) -> GrammarCompiler | None:
    """None: the model folder's tokenizer is missing or of a kind that llguidance cannot read, so that
    requests with a grammar are refused.
    """
    spec = find_tokenizer(config.model_dir, vocab_size, eos_token_ids)
    if spec is None:
        log.warning("no_grammars", reason="no tokenizer.json, or no end token")
        return None
    limits = CompilerLimits(
        cpu_limit_s=config.grammar_cpu_limit_s,
        memory_bytes=config.grammar_memory_bytes,
        cache_bytes=config.grammar_cache_bytes,
    )
    try:
        return GrammarCompiler(spec, limits)
    except ValueError as error:
        log.warning("no_grammars", reason=str(error))
        return None
