"""What the LoRA kernels' ahead-of-time builds have in common: signatures, and the shape that is counted.

The shape is qkv of Llama-3.1-8B with adapters of rank 16 on all three slices: 16 rows of one adapter for a plan made
for decoding, 8,192 rows of eight adapters otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from loraplex_kernels.plans import Phase, PlanTable, When
from loraplex_kernels.support import dtype_size, triton_type

ROUTE: Final = "lora_route"
RANK: Final = 16
NUM_INPUTS: Final = 4096
WIDTHS: Final = (4096, 1024, 1024)
NUM_OUTPUTS: Final = sum(WIDTHS)

ROUTE_SIGNATURE: Final = {
    "headers_ptr": "*i32",
    "row_ptr": "*i32",
    "slot_ptr": "*i32",
    "site": "i32",
    "slot_units": "i32",
}
ROUTE_ALIGNED: Final = ("weights_ptr", "headers_ptr", "row_ptr", "slot_ptr", "slot_units")


@dataclass(frozen=True, slots=True)
class LoraWork:
    """Rows and adapters that a plan entry is counted for."""

    rows: int
    adapters: int
    block_rows: int
    dtype: str

    @property
    def shape(self) -> str:
        """For people."""
        return f"T={self.rows} L={self.adapters} r={RANK} K={NUM_INPUTS} N={NUM_OUTPUTS}"

    def shrink_bytes(self, split_k: int) -> int:
        """x and A once, and h in `split_k` planes."""
        ranks = len(WIDTHS) * RANK
        numbers = self.rows * NUM_INPUTS + self.adapters * ranks * NUM_INPUTS
        return numbers * dtype_size(self.dtype) + 4 * split_k * self.rows * ranks

    def shrink_flops(self) -> int:
        """A multiplication and an addition each."""
        return 2 * self.rows * NUM_INPUTS * len(WIDTHS) * RANK

    def expand_bytes(self, num_outputs: int, split_k: int) -> int:
        """y twice, B once, and h in `split_k` planes."""
        numbers = 2 * self.rows * num_outputs + self.adapters * num_outputs * RANK
        return numbers * dtype_size(self.dtype) + 4 * split_k * self.rows * len(WIDTHS) * RANK

    def expand_flops(self, num_outputs: int) -> int:
        """A multiplication and an addition each."""
        return 2 * self.rows * num_outputs * RANK


def pointer_to(dtype: str) -> str:
    """ "bf16" -> "*bf16"."""
    return f"*{triton_type(dtype)}"


def work_of(table: PlanTable, when: When, *, is_grouped: bool) -> LoraWork:
    """The work of an entry: as many rows as it allows, in blocks as `table` makes for them."""
    phase: Phase = when.phase or "prefill"
    tokens = when.max_tokens or (256 if phase == "decode" else 8192)
    block_rows = table.choose(ROUTE, phase=phase, tokens=tokens).config["BLOCK_M"]
    is_one_row = block_rows == 1
    if is_grouped == is_one_row:
        block_rows = 16 if is_grouped else 1
    if not is_grouped or phase == "decode":
        rows, adapters = (16, 1) if is_grouped else (1, 1)
    else:
        rows, adapters = tokens, 8
    return LoraWork(rows, adapters, block_rows, when.dtype or "bf16")
