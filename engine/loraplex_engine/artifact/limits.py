"""How large an adapter may be."""

from __future__ import annotations

import time

import msgspec

from loraplex_engine.artifact.errors import ArtifactError

MIB = 1 << 20


class AdapterLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Caps that are checked before the work they bound.

    `max_norm` bounds the Frobenius norm of scale * B A of any one module: base weights of this size
    of model have norms of tens to hundreds, so a delta beyond the default is noise or an attack.
    The engine itself serves any finite adapter safely; it passes `math.inf`.
    """

    max_rank: int = 64
    max_norm: float = 1e4
    max_model_bytes: int = 512 * MIB
    max_header_bytes: int = 16 * MIB
    max_config_bytes: int = 1 * MIB
    max_tensors: int = 20_000
    max_patterns: int = 4_096
    max_pattern_chars: int = 1_024
    max_pattern_seconds: float = 2.0  # of CPU, for all regular expressions of one adapter together


class PatternClock:
    """Counts the CPU time of this thread from its making on.

    A pattern with heavy backtracking would otherwise hold up everyone who loads its adapter.
    """

    def __init__(self, limits: AdapterLimits) -> None:
        self._until_s = time.thread_time() + limits.max_pattern_seconds

    def check(self) -> None:
        """Call after each module.

        Raises:
            ArtifactError: `max_pattern_seconds` are over.
        """
        if time.thread_time() > self._until_s:
            raise ArtifactError(
                "adapter_config", "matching its patterns takes too long.", "Use simpler patterns."
            )
