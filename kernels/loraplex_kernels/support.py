"""What each NVIDIA architecture can do, as far as the kernels must know: dtypes, tensor cores, shared memory.

A kernel asks here instead of comparing capabilities itself, so that "no fp8 on sm_80" is written once.
Figures: CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability".
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

import torch

from loraplex_kernels.interpreter import mend_interpreter

# Model dtypes that a kernel computes in; KV dtypes that it may read and write beside them.
ModelDtype = Literal["bf16", "fp16", "fp32"]
KvDtype = Literal["bf16", "fp16", "fp32", "int8", "fp8"]
MODEL_DTYPES: tuple[ModelDtype, ...] = ("bf16", "fp16", "fp32")

_TORCH_NAMES: dict[torch.dtype, KvDtype] = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int8: "int8",
    torch.float8_e4m3fn: "fp8",
}
# The same dtypes in Triton's signatures: a pointer to bf16 is "*bf16".
_TRITON_NAMES: dict[str, str] = {
    "bf16": "bf16",
    "fp16": "fp16",
    "fp32": "fp32",
    "int8": "i8",
    "fp8": "fp8e4nv",
}
_SIZES: dict[str, int] = {"bf16": 2, "fp16": 2, "fp32": 4, "int8": 1, "fp8": 1}


class UnsupportedDeviceError(Exception):
    """No kernel runs on this device, or not with this dtype."""


@dataclass(frozen=True, slots=True)
class Support:
    """One architecture.

    `name` is that of the plan table; `capability` what code is generated for (90: sm_90).
    """

    name: str
    capability: int
    shared_bytes: int  # most that one block may have
    has_fp8: bool  # e4m3 conversions in hardware
    has_wgmma: bool  # warp-group products from 64 rows on; sm_100 has tcgen05 in their place

    def allows(self, dtype: str) -> bool:
        """Whether kernels may load or store `dtype` here (a `KvDtype`)."""
        return dtype in _SIZES and (dtype != "fp8" or self.has_fp8)

    def check(self, dtype: str) -> None:
        """Raise `UnsupportedDeviceError` if `allows` says no; names the dtype and a remedy."""
        if dtype not in _SIZES:
            raise UnsupportedDeviceError(f"dtype {dtype!r}: kernels know {', '.join(_SIZES)}")
        if not self.allows(dtype):
            raise UnsupportedDeviceError(
                f"fp8 needs compute capability 8.9 or newer, this is {self.capability / 10}: use int8"
            )

    def matrix_instruction(self, needs: Literal["mma", "wgmma"]) -> str:
        """The PTX instruction that a product meant as `needs` becomes here."""
        if needs == "wgmma" and self.has_wgmma:
            return "wgmma.mma_async"
        if needs == "wgmma" and self.name == "sm_100":
            return "tcgen05.mma"
        return "mma.sync"


ARCHITECTURES: dict[str, Support] = {
    support.name: support
    for support in (
        Support("sm_80", 80, 163 * 1024, has_fp8=False, has_wgmma=False),
        Support("sm_89", 89, 99 * 1024, has_fp8=True, has_wgmma=False),
        Support("sm_90", 90, 227 * 1024, has_fp8=True, has_wgmma=True),
        Support("sm_100", 100, 227 * 1024, has_fp8=True, has_wgmma=False),
    )
}


def support_of_capability(major: int, minor: int) -> Support:
    """What a GPU can do; relatives of the four architectures use the plans of the nearest.

    Raises:
        UnsupportedDeviceError: older than 8.0 (no bf16).
    """
    capability = 10 * major + minor
    if capability < 80:
        raise UnsupportedDeviceError(
            f"compute capability {major}.{minor}: the kernels need 8.0 (A100) or newer"
        )
    if f"sm_{capability}" in ARCHITECTURES:
        return ARCHITECTURES[f"sm_{capability}"]
    if major in (9, 10):
        nearest = ARCHITECTURES["sm_90" if major == 9 else "sm_100"]
        return Support(
            nearest.name, capability, nearest.shared_bytes, nearest.has_fp8, nearest.has_wgmma
        )
    # 8.6, 8.7 and 12.x have the small shared memory and the warp-level tensor cores of 8.9.
    return Support("sm_89", capability, 99 * 1024, has_fp8=capability >= 89, has_wgmma=False)


def support_of(device: torch.device) -> Support:
    """What `device` can do. A CPU (Triton's interpreter) stands in for sm_90.

    Raises:
        UnsupportedDeviceError: neither an NVIDIA GPU of capability 8.0 or newer nor a CPU.
    """
    if device.type == "cpu":
        return ARCHITECTURES["sm_90"]
    if device.type != "cuda" or torch.version.cuda is None:
        raise UnsupportedDeviceError(f"device {device}: the kernels run on NVIDIA GPUs")
    return support_of_capability(*torch.cuda.get_device_capability(device))


def dtype_name(dtype: torch.dtype) -> KvDtype:
    """`torch.bfloat16` -> "bf16".

    Raises:
        UnsupportedDeviceError: kernels do not know it.
    """
    if dtype not in _TORCH_NAMES:
        raise UnsupportedDeviceError(f"{dtype}: kernels know {', '.join(map(str, _TORCH_NAMES))}")
    return _TORCH_NAMES[dtype]


def triton_type(dtype: str) -> str:
    """How Triton's signatures write a `KvDtype`: "fp8" -> "fp8e4nv"."""
    return _TRITON_NAMES[dtype]


def dtype_size(dtype: str) -> int:
    """Bytes of one number of a `KvDtype`."""
    return _SIZES[dtype]


def is_interpreted() -> bool:
    """Whether Triton runs kernels in numpy (TRITON_INTERPRET=1), where CPU tensors are taken."""
    return os.environ.get("TRITON_INTERPRET") == "1"


if is_interpreted():
    mend_interpreter()
