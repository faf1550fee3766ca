"""Guesses of a row's next tokens, which one forward verifies. A wrong guess costs time, never text."""

from loraplex_engine.speculative.base import Ask, Proposer
from loraplex_engine.speculative.drafter import DraftCounts, Drafter, DraftWant
from loraplex_engine.speculative.setup import make_drafter

__all__ = ["Ask", "DraftCounts", "DraftWant", "Drafter", "Proposer", "make_drafter"]
