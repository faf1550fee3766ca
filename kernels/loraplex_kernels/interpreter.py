"""Makes Triton's interpreter compute bf16 and fp8 as a GPU does. Only what TRITON_INTERPRET=1 runs is touched.

The interpreter keeps bf16 as uint16 and fp8 as uint8, and as of Triton 3.6 to 3.9
- multiplies those bit patterns as integers in `tl.dot`;
- takes an integer's bits for a bf16 number's when converting;
- cuts bf16 off where hardware rounds to nearest even, and loses NaN and the carry of a rounding in fp8;
- adds, compares and reduces the bit patterns as integers, which kernels must not do anyway: widen first. That raises;
- warns of overflows and invalid operations as numpy does, of which hardware says nothing;
- patches the whole language anew at every call of a jitted function within another, `tl.sum` and its like too.
"""
# ruff: noqa: ANN401 -- Triton's internals have no types

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import numpy as np
import torch


@cache
def mend_interpreter() -> None:
    """Replace the interpreter's conversions and products, once. `support` does so on import."""
    import triton.language as tl
    from triton.runtime import interpreter

    torch_types = {
        tl.bfloat16: torch.bfloat16,
        tl.float16: torch.float16,
        tl.float32: torch.float32,
        tl.float64: torch.float64,
        tl.float8e4nv: torch.float8_e4m3fn,
        tl.float8e5: torch.float8_e5m2,
    }
    packed = (tl.bfloat16, tl.float8e4nv, tl.float8e5)
    original_convert = interpreter._convert_float
    builder = interpreter.InterpreterBuilder

    def convert(data: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
        is_to_nearest = rounding_mode in (None, interpreter._ir.ROUNDING_MODE.RTNE)
        if source not in torch_types or target not in torch_types or not is_to_nearest:
            return original_convert(data, source, target, rounding_mode)
        values = _as_tensor(data, torch_types[source])
        if target in (tl.float8e4nv, tl.float8e5):
            largest = torch.finfo(torch_types[target]).max
            values = values.float().clamp(-largest, largest)  # as cvt.rn.satfinite
        whole = getattr(torch, f"uint{target.primitive_bitwidth}")
        return values.to(torch_types[target]).view(whole).numpy().reshape(np.shape(data))

    def create_dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        if d.dtype.scalar.is_floating():
            a_data, b_data = (
                _as_tensor(side.data, torch_types[side.dtype.scalar])
                .double()
                .numpy()
                .reshape(side.data.shape)
                for side in (a, b)
            )
            # A BLAS sums rows of one tile in different orders, which tensor cores do not: in fp64 the difference
            # is below what rounding to fp32 leaves.
            product = np.matmul(a_data, b_data).astype(d.data.dtype) + d.data
        else:
            product = np.matmul(a.data, b.data, dtype=d.data.dtype) + d.data
        return interpreter.TensorHandle(product, d.dtype.scalar)

    original_cast = builder.cast_impl

    def cast(self: Any, source: Any, target: Any) -> Any:
        if target.scalar in packed and not source.dtype.scalar.is_floating():
            wide = original_cast(self, source, tl.float32)
            return interpreter.TensorHandle(
                convert(wide.data, tl.float32, target.scalar, None), target.scalar
            )
        return original_cast(self, source, target)

    def refuse_packed(name: str) -> Any:
        original = getattr(builder, name)

        def checked(self: Any, first: Any, *others: Any) -> Any:
            if first.dtype.scalar in packed:
                raise TypeError(f"arithmetic on {first.dtype.scalar}: convert to float32 first")
            return original(self, first, *others)

        return checked

    call = interpreter.GridExecutor.__call__
    patch_language = interpreter._patch_lang
    launches: list[set[int]] = []  # of the running ones, the language modules patched so far

    def call_quietly(self: Any, *arguments: Any, **named: Any) -> None:
        launches.append(set())
        try:
            with np.errstate(all="ignore"), warnings.catch_warnings():
                # Of a maximum over NaN alone; a GPU's is NaN without a word.
                warnings.filterwarnings("ignore", "All-NaN", RuntimeWarning)
                call(self, *arguments, **named)
        finally:
            launches.pop()

    def patch_once(fn: Any) -> Any:
        languages = {
            id(value) for value in fn.__globals__.values() if value is tl or value is tl.core
        }
        if launches and languages and languages <= launches[-1]:
            return None  # a nested call, which asks for no way back
        scope = patch_language(fn)
        if launches:
            launches[-1] |= languages
        return scope

    patch_tensor = interpreter._patch_lang_tensor

    def patch_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        # Triton 3.6 makes a Python int of an array of one element, which NumPy 2.4 refuses.
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    interpreter._patch_lang_tensor = patch_index
    interpreter._convert_float = convert
    interpreter.GridExecutor.__call__ = call_quietly
    interpreter._patch_lang = patch_once
    builder.create_dot = create_dot
    builder.cast_impl = cast
    builder.binary_op = refuse_packed("binary_op")
    builder.unary_op = refuse_packed("unary_op")


def _as_tensor(data: Any, dtype: torch.dtype) -> torch.Tensor:
    """The bits of a numpy array as `dtype`, flattened; a copy, as the array may be read-only."""
    return torch.from_numpy(np.array(data).reshape(-1)).view(dtype)
