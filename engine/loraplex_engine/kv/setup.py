"""The prefix cache as the settings say."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from loraplex_engine.block_events import BlockEvent
from loraplex_engine.config import EngineConfig, EngineSizes
from loraplex_engine.kv.hashing import BlockHasher
from loraplex_engine.kv.prefix_cache import PrefixCache
from loraplex_engine.kv.public_prefix import load_public_prefixes

log = structlog.get_logger(__name__)


def open_prefix_cache(
    config: EngineConfig,
    sizes: EngineSizes,
    *,
    model_fingerprint: str,
    kv_format: str,
    vocab_size: int,
    publish: Callable[[BlockEvent], None] | None = None,
) -> PrefixCache | None:
    """None where it is switched off.

    Raises:
        ConfigError: the file with public prefixes is not what it should be.
    """
    if not config.prefix_cache:
        return None
    prefixes: tuple[tuple[int, ...], ...] = ()
    if config.public_prefix_file is not None:
        prefixes = load_public_prefixes(
            config.public_prefix_file,
            model_dir=config.model_dir,
            vocab_size=vocab_size,
            block_size=config.block_size,
        )
        log.info("public_prefixes", num_tokens=[len(prefix) for prefix in prefixes])
    hasher = BlockHasher(
        model_fingerprint=model_fingerprint,
        kv_format=kv_format,
        block_size=config.block_size,
        public_prefixes=prefixes,
    )
    return PrefixCache(
        hasher,
        sizes.num_blocks,
        tenant_share=config.prefix_cache_tenant_share,
        publish=publish,
    )
