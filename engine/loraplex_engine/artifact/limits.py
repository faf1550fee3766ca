"""How large an adapter may be."""

from __future__ import annotations

import msgspec

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
