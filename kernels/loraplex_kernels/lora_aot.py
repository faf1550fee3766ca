"""What the LoRA kernels' ahead-of-time builds have in common: signatures, and the shape that is counted.

The shape is qkv of Llama-3.1-8B with adapters on all three slices: a block of one adapter's rows for plans made for
decoding, the longest step of eight adapters otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from loraplex_kernels.plans import Phase, Plan, PlanTable
from loraplex_kernels.support import dtype_size, triton_type

ROUTE: Final = "lora_route"
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
    """One kind of launch, and the rows and adapters that it is counted for."""

    phase: Phase
    tokens: int  # of the step, which plans are chosen by
    rows: int
    adapters: int
    rank: int
    block_rows: int
    dtype: str

    def choose(self, table: PlanTable, kernel: str) -> Plan:
        """The plan of one of the launch's kernels."""
        return table.choose(
            kernel,
            phase=self.phase,
            tokens=self.tokens,
            rank=self.rank,
            k=NUM_INPUTS,
            n=NUM_OUTPUTS,
            dtype=self.dtype,
        )

    def matrix_instruction(self, plan: Plan) -> Literal["mma", "wgmma"] | None:
        """What a grouped kernel's products are meant to be."""
        if self.dtype == "fp32" or self.block_rows == 1:
            return None
        return "wgmma" if self.block_rows >= 64 and plan.num_warps % 4 == 0 else "mma"

    @property
    def shape(self) -> str:
        """For people."""
        return f"T={self.rows} L={self.adapters} r={self.rank} K={NUM_INPUTS} N={NUM_OUTPUTS}"

    def shrink_bytes(self, split_k: int) -> int:
        """x and A once, and h in `split_k` planes."""
        ranks = len(WIDTHS) * self.rank
        numbers = self.rows * NUM_INPUTS + self.adapters * ranks * NUM_INPUTS
        return numbers * dtype_size(self.dtype) + 4 * split_k * self.rows * ranks

    def shrink_flops(self) -> int:
        """A multiplication and an addition each."""
        return 2 * self.rows * NUM_INPUTS * len(WIDTHS) * self.rank

    def expand_bytes(self, num_outputs: int, split_k: int) -> int:
        """y twice, B once, and h in `split_k` planes."""
        numbers = 2 * self.rows * num_outputs + self.adapters * num_outputs * self.rank
        return numbers * dtype_size(self.dtype) + 4 * split_k * self.rows * len(WIDTHS) * self.rank

    def expand_flops(self, num_outputs: int) -> int:
        """A multiplication and an addition each."""
        return 2 * self.rows * num_outputs * self.rank


def pointer_to(dtype: str) -> str:
    """ "bf16" -> "*bf16"."""
    return f"*{triton_type(dtype)}"


def works(table: PlanTable, dtypes: Sequence[str], *, is_grouped: bool) -> Iterator[LoraWork]:
    """Every kind of launch that `table` leads to: at each bound of its entries, ranks 16 and 64.

    What depends on the dtype is few: other dtypes than bf16 at the longest steps only.

    Args:
        is_grouped: launches of the grouped kernels, else of those for single rows.
    """
    kernels = (ROUTE, "lora_shrink", "lora_expand")
    whens = [entry.when for kernel in kernels for entry in table.entries(kernel)]
    longest: dict[Phase, int] = {"decode": 256, "prefill": 8192}
    for phase, most in longest.items():
        bounds = {when.max_tokens for when in whens if when.phase in (None, phase)}
        for tokens in sorted({most, *(bound for bound in bounds if bound and bound < most)}):
            block_rows = table.choose(ROUTE, phase=phase, tokens=tokens).config["BLOCK_M"]
            if (block_rows > 1) != is_grouped:
                continue
            rows, adapters = (tokens, 8) if phase == "prefill" else (min(tokens, block_rows), 1)
            for dtype in dtypes if tokens == most else dtypes[:1]:
                for rank in (16, 64):
                    yield LoraWork(phase, tokens, rows, adapters, rank, block_rows, dtype)
