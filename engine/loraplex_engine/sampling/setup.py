"""Chooses how draws are made here: with the native filter where it can be compiled, else in numpy alone."""

from __future__ import annotations

from pathlib import Path

import structlog
from loraplex_kernels.cpu.build import NativeBuildError
from loraplex_kernels.cpu.gumbel import GumbelSurvivors

log = structlog.get_logger(__name__)


def open_survivors(cache_dir: Path) -> GumbelSurvivors | None:
    """The filter, compiled into `cache_dir`; None, with a warning: draws are slower, not different."""
    try:
        return GumbelSurvivors(cache_dir)
    except NativeBuildError as error:
        log.warning("native_sampling_unavailable", reason=str(error))
        return None
