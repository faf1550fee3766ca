"""Where the kernels run: a GPU if Triton is not interpreted, else the CPU."""

from __future__ import annotations

import pytest
import torch
from loraplex_kernels.support import is_interpreted


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device for a kernel's tensors."""
    return torch.device("cpu" if is_interpreted() else "cuda")
