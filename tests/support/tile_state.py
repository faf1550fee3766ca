"""Whether a call leaves matrix tiles (AMX) configured in the thread that made it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from loraplex_kernels.cpu import build


def leaves_tiles_in_use(call: Callable[[], object], cache_dir: Path) -> bool:
    """Runs `call` with the tiles released before; only on a CPU with tiles that the process was allowed to use."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "SOURCES", Path(__file__).parent)
        state = build.load_library("tile_state", cache_dir)
    state.tiles_take()
    assert state.tiles_in_use(), "it would be seen"
    state.tiles_release()
    assert not state.tiles_in_use()
    call()
    in_use = bool(state.tiles_in_use())
    state.tiles_release()
    return in_use
