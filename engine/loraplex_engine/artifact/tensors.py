"""A strict reader of safetensors: bytes in, named views out, or an `ArtifactError`.

Format: an 8-byte little-endian header length, a JSON header of
{name: {"dtype", "shape", "data_offsets": [begin, end]}} with an optional "__metadata__" of strings,
then the data. Stricter than the format's reference reader: keys may not repeat, ranges must cover
the data exactly once and in full, no tensor may be empty, dtypes are F16, BF16 and F32 only.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any, Final, Literal, NoReturn

import numpy as np
import numpy.typing as npt

from loraplex_engine.artifact.errors import ArtifactError
from loraplex_engine.artifact.limits import AdapterLimits

FloatDType = Literal["F16", "BF16", "F32"]

ITEM_BYTES: Final[dict[str, int]] = {"F16": 2, "BF16": 2, "F32": 4}

FIELD = "adapter_model"
SAVE_AGAIN = "Save the adapter again with safetensors (PEFT's save_pretrained does so by default)."

# What people upload by mistake (or on purpose), by its first bytes.
_FOREIGN_FORMATS: Final[tuple[tuple[bytes, str], ...]] = (
    (b"PK\x03\x04", "a zip archive (a PyTorch .bin or .pt file is one and holds a pickle)"),
    (b"PK\x05\x06", "an empty zip archive"),
    (b"\x1f\x8b", "a gzip file"),
    (b"BZh", "a bzip2 file"),
    (b"\xfd7zXZ", "an xz file"),
    (b"(\xb5/\xfd", "a zstd file"),
    (b"GGUF", "a GGUF file"),
    (b"\x89HDF", "an HDF5 file"),
    (b"\x93NUMPY", "a numpy file"),
    (b"version https://git-lfs", "a Git LFS pointer, not the file it points to"),
)


@dataclass(frozen=True, slots=True)
class TensorView:
    """One tensor of a file that is held in memory as a whole."""

    name: str
    dtype: FloatDType
    shape: tuple[int, ...]
    data: memoryview  # read-only, little-endian, C order

    @property
    def size_bytes(self) -> int:
        """Bytes of data."""
        return self.data.nbytes

    def bits(self) -> npt.NDArray[Any]:
        """The stored bits without conversion: uint16 for F16 and BF16, uint32 for F32; read-only."""
        dtype = "<u4" if self.dtype == "F32" else "<u2"
        return np.frombuffer(self.data, dtype=dtype).reshape(self.shape)

    def to_float32(self) -> npt.NDArray[np.float32]:
        """The values as fp32, exact for every supported dtype; a copy unless stored as F32."""
        if self.dtype == "F32":
            return np.frombuffer(self.data, dtype="<f4").reshape(self.shape)
        if self.dtype == "F16":
            half = np.frombuffer(self.data, dtype="<f2").reshape(self.shape)
            return half.astype(np.float32)
        # bfloat16 is the upper half of a float32.
        return (self.bits().astype(np.uint32) << 16).view(np.float32)

    def sha256(self) -> str:
        """Hex digest of the stored bytes."""
        return hashlib.sha256(self.data).hexdigest()


def read_tensors(file: bytes | memoryview, *, limits: AdapterLimits) -> dict[str, TensorView]:
    """Parse a whole safetensors file; the views share its memory.

    Returns:
        Views by tensor name, sorted by name.

    Raises:
        ArtifactError: not a safetensors file, or not a well-formed one.
    """
    view = memoryview(file).toreadonly().cast("B")
    _refuse_foreign_format(bytes(view[:512]))
    if len(view) < 8:
        _refuse(f"the file has {len(view)} bytes, too few for a safetensors header.")

    header_bytes = int.from_bytes(view[:8], "little")
    if header_bytes > limits.max_header_bytes:
        _refuse(f"the header claims {header_bytes} bytes; {limits.max_header_bytes} are allowed.")
    if header_bytes > len(view) - 8:
        _refuse(
            f"the header claims {header_bytes} bytes, but only {len(view) - 8} follow: truncated?"
        )

    header = _parse_header(view[8 : 8 + header_bytes])
    header.pop("__metadata__", None)
    if not header:
        _refuse("it holds no tensors.")
    if len(header) > limits.max_tensors:
        _refuse(f"it holds {len(header)} tensors; {limits.max_tensors} are allowed.")

    data = view[8 + header_bytes :]
    views: dict[str, TensorView] = {}
    ranges: list[tuple[int, int, str]] = []
    for name in sorted(header):
        dtype, shape, begin, end = _parse_entry(name, header[name], data_bytes=len(data))
        views[name] = TensorView(name=name, dtype=dtype, shape=shape, data=data[begin:end])
        ranges.append((begin, end, name))
    _check_coverage(ranges, data_bytes=len(data))
    return views


def _refuse(message: str, *, tensor: str | None = None, remedy: str = SAVE_AGAIN) -> NoReturn:
    field = FIELD if tensor is None else f"{FIELD}.{tensor[:200]}"
    raise ArtifactError(field, message, remedy)


def _refuse_foreign_format(start: bytes) -> None:
    for magic, what in _FOREIGN_FORMATS:
        if start.startswith(magic):
            _refuse(f"this is {what}, not a safetensors file.")
    # A pickle opens with PROTO (0x80) and its version. Read as a header length it is beyond 16 MiB.
    if len(start) >= 8 and start[0] == 0x80 and start[1] <= 5 and any(start[3:8]):
        _refuse("this is a Python pickle, which can run code when it is opened; it was not opened.")
    if start[257:262] == b"ustar":
        _refuse("this is a tar archive, not a safetensors file.")


def _parse_header(raw: memoryview) -> dict[str, Any]:
    def pairs_to_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            seen: set[str] = set()
            for name, _ in pairs:
                if name in seen:
                    _refuse(f"the header names {name[:200]!r} twice.")
                seen.add(name)
        return result

    def refuse_constant(text: str) -> NoReturn:
        _refuse(f"the header holds {text}, which is not JSON.")

    try:
        text = bytes(raw).decode("utf-8")
        if not text.startswith("{"):
            _refuse("the header does not start with '{': not a safetensors file, or damaged.")
        header = json.loads(text, object_pairs_hook=pairs_to_dict, parse_constant=refuse_constant)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError, ValueError) as error:
        _refuse(
            f"the header is not valid JSON ({type(error).__name__}): damaged or not safetensors."
        )
    if not isinstance(header, dict):
        _refuse("the header is not a JSON object.")
    metadata = header.get("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        _refuse("__metadata__ must map strings to strings.")
    return header


def _parse_entry(
    name: str, entry: object, *, data_bytes: int
) -> tuple[FloatDType, tuple[int, ...], int, int]:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        _refuse("its entry must have exactly dtype, shape and data_offsets.", tensor=name)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if dtype not in ("F16", "BF16", "F32"):
        _refuse(
            f"its dtype is {str(dtype)[:40]!r}; F16, BF16 and F32 are supported.",
            tensor=name,
            remedy="Convert the adapter's tensors to bfloat16 and save it again.",
        )
    if not isinstance(shape, list) or not all(_is_count(n) for n in shape) or len(shape) > 8:
        _refuse("its shape must be a list of at most 8 non-negative integers.", tensor=name)
    if (
        not isinstance(offsets, list)
        or len(offsets) != 2
        or not all(_is_count(offset) for offset in offsets)
    ):
        _refuse("its data_offsets must be two non-negative integers.", tensor=name)
    begin, end = offsets
    size_bytes = ITEM_BYTES[dtype]
    for n in shape:  # Python integers do not overflow
        size_bytes *= n
    if size_bytes == 0:
        _refuse(f"it is empty (shape {shape}).", tensor=name)
    if not begin < end <= data_bytes:
        _refuse(
            f"it ends at byte {end} of {data_bytes} of data: the file is truncated or damaged.",
            tensor=name,
        )
    if end - begin != size_bytes:
        _refuse(
            f"shape {shape} of {dtype} takes {size_bytes} bytes, its range has {end - begin}.",
            tensor=name,
        )
    return dtype, tuple(shape), begin, end


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 48


def _check_coverage(ranges: list[tuple[int, int, str]], *, data_bytes: int) -> None:
    """Ranges must tile the data: an overlap could alias tensors, a gap could smuggle bytes."""
    covered = 0
    for begin, end, name in sorted(ranges):
        if begin < covered:
            _refuse(f"its bytes overlap another tensor's (at byte {begin}).", tensor=name)
        if begin > covered:
            _refuse(f"{begin - covered} bytes before it belong to no tensor.", tensor=name)
        covered = end
    if covered != data_bytes:
        _refuse(f"{data_bytes - covered} bytes at the end belong to no tensor.")
