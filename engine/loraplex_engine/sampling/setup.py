"""Chooses how tokens are found here: by native scan and filter where they can be compiled, else in numpy alone."""

from __future__ import annotations

from pathlib import Path

import structlog
from loraplex_kernels.cpu.build import NativeBuildError
from loraplex_kernels.cpu.gumbel import GumbelSurvivors
from loraplex_kernels.cpu.scan import RowScan

log = structlog.get_logger(__name__)


def open_survivors(cache_dir: Path) -> GumbelSurvivors | None:
    """The filter, compiled into a folder of `cache_dir`; None, with a warning: draws are slower, not different."""
    try:
        return GumbelSurvivors(cache_dir / "native")
    except NativeBuildError as error:
        log.warning("native_sampling_unavailable", reason=str(error))
        return None


def open_scan(cache_dir: Path, num_threads: int) -> RowScan | None:
    """The scan for best ids, compiled into a folder of `cache_dir`; None, with a warning: slower, not different."""
    try:
        return RowScan(cache_dir / "native", num_threads=num_threads)
    except NativeBuildError as error:
        log.warning("native_scan_unavailable", reason=str(error))
        return None
