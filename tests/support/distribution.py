"""Which worker of `pytest -n` runs what: whole groups, the longest first.

xdist has `--dist loadgroup` for that, but its 3.8 writes the group into a test's id by an attribute that
pytest 9.2 no longer reads: every test became a group of its own, and each worker built every shared
set-up (the demo, the fleets, the gateway's stand, the parity oracles) for itself.
"""

from __future__ import annotations

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

# Folders that share a set-up that takes long, or a machine's patience. Any other file is a group; the
# gateway's stand takes a second to open, and checking its books takes longer with every request in them.
_FOLDERS = ("e2e", "chaos", "admin_ui")
# What takes longest, in that order: begun late, it would keep one worker busy while the other is done.
_FIRST = (
    "e2e",
    "chaos",
    "test_compose_serves.py",
    "platform/gateway/test_tools_with_engine.py",
    "engine/test_parity_peft.py",
    "engine/test_speculative_runner.py",
    "engine/test_attention_backends.py",
    "platform/billing/test_document.py",
    "platform/control/test_matrix.py",
    "platform/control/test_oidc.py",
    "platform/control/test_adapters.py",
    "kernels/test_aot.py",
    "engine/test_triton_engine.py",
    "platform/gateway/test_templates.py",
    "platform/gateway/test_tools.py",
    "bench/test_gpu_check.py",
    "engine/test_lora_isolation.py",
    "admin_ui",
    "platform/local/test_embedded.py",
)


def group_of(nodeid: str) -> str:
    """The group of a test by its id: a folder or a file, relative to tests/."""
    path = nodeid.partition("::")[0].removeprefix("tests/")
    return next((folder for folder in _FOLDERS if path.startswith(f"{folder}/")), path)


def order_of(nodeid: str) -> int:
    """A sort key: groups that take long come first, all others as they were collected."""
    group = group_of(nodeid)
    return _FIRST.index(group) if group in _FIRST else len(_FIRST)


class GroupScheduling(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """Hands out whole groups in the order of collection."""

    def __init__(self, config: pytest.Config, log: Producer | None = None) -> None:
        # Else the groups with the most tests go first, which are not those that take longest.
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)
