"""The drafter that the settings ask for."""

from __future__ import annotations

from loraplex_engine.config import EngineConfig
from loraplex_engine.speculative.base import Proposer
from loraplex_engine.speculative.costs import StepCosts
from loraplex_engine.speculative.drafter import Drafter
from loraplex_engine.speculative.ngram import NgramProposer


def make_drafter(config: EngineConfig, proposer: Proposer | None = None) -> Drafter | None:
    """None: speculation is off. `proposer`: another source of drafts than the row's own n-grams."""
    if config.speculative == "off":
        return None
    return Drafter(
        proposer or NgramProposer(config.ngram_min, config.ngram_max),
        config.num_speculative_tokens,
        StepCosts() if config.speculative == "auto" else None,
    )
