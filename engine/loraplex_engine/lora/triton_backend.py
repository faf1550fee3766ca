"""The GPU's LoRA backend: our Triton kernels over slots in device memory, recordable in CUDA graphs.

`prepare` sorts the step's rows by slot into staged arrays (`lora_route`) and brings the slots in use up to date;
then every site is two launches, the embedding one. What is launched depends on the number of rows, the bucket of
active adapters and the phase only, in fixed device memory: so an eager step and a replayed one compute the same bits.

Which plan: steps of up to `max_decode_tokens` rows take the plans of decoding, for the largest rank that may be
served; longer ones those of prefill, for the largest rank that the step has. In the `invariant` column all of these
are one configuration, so that there a row's bits depend on its own x and adapter only.

T rows of the step, B blocks and P places of the route, S spans of K, R ranks over all slices of a site.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from loraplex_kernels.lora_embed import lora_embed
from loraplex_kernels.lora_expand import lora_expand
from loraplex_kernels.lora_route import LoraRoute, num_blocks_for, route_rows
from loraplex_kernels.lora_rows import lora_rows_expand, lora_rows_shrink
from loraplex_kernels.lora_shrink import lora_shrink
from loraplex_kernels.lora_slots import a_row_length, padded_rank
from loraplex_kernels.plans import Phase, Plan, PlanTable
from loraplex_kernels.support import dtype_name
from torch import Tensor

from loraplex_engine.artifact import ModelShape
from loraplex_engine.device.staging import Staged, Staging
from loraplex_engine.lora.backend import SlotWeights
from loraplex_engine.lora.device_slots import DeviceAdapter, DeviceSlots
from loraplex_engine.lora.seam import LoraBatch, LoraSite
from loraplex_engine.lora.sites import (
    SITE_INDEX,
    SITES,
    embedding_index,
    head_index,
    num_sites,
    site_layouts,
)
from loraplex_engine.step import Int32Array


@dataclass(frozen=True, slots=True)
class TritonLoraSizes:
    """What the backend reserves memory for."""

    num_slots: int
    max_rank: int  # of one module, as `--max-lora-rank` says
    max_tokens: int  # rows of a step, padding counted
    max_decode_tokens: int  # rows of a step that may be recorded


@dataclass(frozen=True, slots=True)
class _Linear:
    """A kind of site: one of a layer's four, or the head."""

    num_inputs: int
    widths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _LinearPlans:
    """How a kind of site is launched."""

    shrink: Plan
    expand: Plan
    h_SPR: Tensor


@dataclass(frozen=True, slots=True)
class _Work:
    """All that is the same for every step of as many rows and active adapters."""

    phase: Phase
    active_bucket: int
    block_rows: int
    num_blocks: int
    linears: dict[_Linear, _LinearPlans]
    embed: Plan


@dataclass(frozen=True, slots=True)
class _TritonBatch:
    """A step's rows, or those that sample."""

    num_rows: int
    work: _Work
    route: LoraRoute
    # By site number, the largest rank of any active adapter, or of any that may come; 0: no launch.
    rank_S: tuple[int, ...]
    adapts_head: bool


class _Region:
    """The staged arrays of one batch, and what was last written there."""

    def __init__(self, staging: Staging, name: str, max_blocks: int, max_places: int) -> None:
        # Blocks first: what is copied up begins at the first reservation and ends with the last byte in use.
        self.slot_B: Final[Staged] = staging.reserve(f"{name}_slot", (max_blocks,), np.int32)
        self.row_P: Final[Staged] = staging.reserve(f"{name}_row", (max_places,), np.int32)
        self.key: tuple[bytes, int] | None = None
        self.batch: _TritonBatch | None = None

    def use(self, work: _Work) -> None:
        """Have the next flush carry the route of a batch."""
        self.slot_B.use(work.num_blocks)
        self.row_P.use(work.num_blocks * work.block_rows)


class TritonLora:
    """`CapturableLora` on a GPU, or interpreted on a CPU."""

    name: Final = "triton"

    def __init__(
        self,
        pool: SlotWeights[DeviceAdapter],
        shape: ModelShape,
        sizes: TritonLoraSizes,
        *,
        dtype: torch.dtype,
        device: torch.device,
        plans: PlanTable,
        staging: Staging | None = None,
    ) -> None:
        """Take device memory for all slots and for h.

        Args:
            pool: whose slots the rows name; fewer than `sizes.num_slots` + 1.
            staging: where a step's metadata goes up; not yet sealed, and flushed by whoever owns it between
                `prepare` and the first launch. None: the backend has one of its own and flushes it itself.
        """
        self._pool = pool
        self._sizes = sizes
        self._plans = plans
        self._dtype = dtype_name(dtype)
        self._rank = padded_rank(sizes.max_rank)
        self._embedding_index = embedding_index(shape)
        self._head_index = head_index(shape)
        layouts = site_layouts(shape)
        self._linears = {
            layout.site: _Linear(layout.num_inputs, tuple(width for _, _, width in layout.slices))
            for layout in layouts
        }
        self._head = _Linear(shape.hidden_size, (shape.vocab_size,))
        self._hidden_size = shape.hidden_size
        self._most_S = tuple(self._most_ranks(shape))
        self.slots: Final = DeviceSlots(
            shape,
            num_slots=sizes.num_slots,
            max_rank=sizes.max_rank,
            dtype=dtype,
            device=device,
        )
        self._works: dict[tuple[int, int, int], _Work] = {}
        largest = list(self._largest_shapes())
        self._h = torch.empty(
            max(size for _, _, size in largest), dtype=torch.float32, device=device
        )
        max_blocks = max(blocks for blocks, _, _ in largest)
        max_places = max(places for _, places, _ in largest)
        self._own_staging = Staging(device) if staging is None else None
        reserver = self._own_staging or staging
        assert reserver is not None
        self._step = _Region(reserver, "lora", max_blocks, max_places)
        self._sampled = _Region(reserver, "lora_head", max_blocks, max_places)
        if self._own_staging is not None:
            self._own_staging.seal()

    @property
    def device_bytes(self) -> int:
        """See `CapturableLora.device_bytes`; staging is counted by its owner."""
        return self.slots.size_bytes + self._h.numel() * 4

    # ------------------------------------------------------------------------------------ a step

    def prepare(
        self, slot_T: Int32Array, pool_version: int, *, of_head: bool = False
    ) -> LoraBatch | None:
        """See `LoraBackend.prepare`. Copies adapters into slots that hold others, on the current stream.

        Raises:
            ValueError: more rows than the backend was made for.
        """
        if len(slot_T) > self._sizes.max_tokens:
            raise ValueError(
                f"a step has {len(slot_T)} rows, room was reserved for {self._sizes.max_tokens}"
            )
        region = self._sampled if of_head else self._step
        self._wait_own()
        # Decoding repeats its step's rows until one of them or a slot changes.
        key = (slot_T.tobytes(), pool_version)
        if region.key == key and region.batch is not None:
            region.use(region.batch.work)
            self._flush_own()
            return region.batch
        region.key = region.batch = None
        active = np.unique(slot_T)
        active = active[active >= 0]
        if not len(active):
            return None
        adapters = [self._pool.weights(slot) for slot in active.tolist()]
        for slot, adapter in zip(active.tolist(), adapters, strict=True):
            self.slots.hold(slot, adapter)
        rank_S = np.maximum.reduce([adapter.rank_S for adapter in adapters])
        max_rank = max(adapter.max_rank for adapter in adapters)
        work = self._work(len(slot_T), self._bucket(len(active)), max_rank)
        region.use(work)
        route_rows(
            slot_T,
            block_rows=work.block_rows,
            row_P=region.row_P.host[: work.num_blocks * work.block_rows],
            slot_B=region.slot_B.host[: work.num_blocks],
        )
        region.key = key
        region.batch = self._make_batch(region, len(slot_T), work, rank_S.tolist())
        self._flush_own()
        return region.batch

    def add(self, y_TN: Tensor, x_TK: Tensor, layer: int, site: LoraSite, batch: LoraBatch) -> None:
        """See `LoraBackend.add`."""
        assert isinstance(batch, _TritonBatch)
        index = layer * len(SITES) + SITE_INDEX[site]
        self._add(y_TN, x_TK, index, self._linears[site], batch)

    def add_embedding(self, y_TH: Tensor, token_T: Tensor, batch: LoraBatch) -> None:
        """See `LoraBackend.add_embedding`."""
        assert isinstance(batch, _TritonBatch)
        index = self._embedding_index
        if batch.rank_S[index]:
            work = batch.work
            lora_embed(y_TH, token_T, self.slots.kernel_view, index, batch.route, work.embed)

    def adapts_head(self, batch: LoraBatch) -> bool:
        """See `LoraBackend.adapts_head`."""
        assert isinstance(batch, _TritonBatch)
        return batch.adapts_head

    def add_head(self, y_RV: Tensor, x_RH: Tensor, batch: LoraBatch) -> None:
        """See `LoraBackend.add_head`."""
        assert isinstance(batch, _TritonBatch)
        self._add(y_RV, x_RH, self._head_index, self._head, batch)

    def _add(
        self, y_TN: Tensor, x_TK: Tensor, index: int, linear: _Linear, batch: _TritonBatch
    ) -> None:
        rank = batch.rank_S[index]
        if not rank:
            return
        work = batch.work
        plans = work.linears[linear]
        shrink, expand = (
            (lora_rows_shrink, lora_rows_expand)
            if work.block_rows == 1
            else (lora_shrink, lora_expand)
        )
        # Padding ids that the head does not compute are the last rows of B.
        widths = linear.widths if len(linear.widths) > 1 else (y_TN.shape[1],)
        view = self.slots.kernel_view
        shrink(
            x_TK,
            view,
            index,
            batch.route,
            plans.h_SPR,
            plans.shrink,
            a_stride=a_row_length(linear.num_inputs),
            max_rank=rank,
        )
        expand(y_TN, plans.h_SPR, view, index, batch.route, widths, plans.expand)

    # ------------------------------------------------------------------------------- for recording

    @property
    def active_buckets(self) -> tuple[int, ...]:
        """See `CapturableLora.active_buckets`."""
        last = self._sizes.num_slots
        return (*(1 << bit for bit in range((last - 1).bit_length())), last)

    def active_bucket(self, batch: LoraBatch) -> int:
        """See `CapturableLora.active_bucket`."""
        assert isinstance(batch, _TritonBatch)
        return batch.work.active_bucket

    def capture_batch(self, num_tokens: int, active_bucket: int) -> LoraBatch:
        """See `CapturableLora.capture_batch`."""
        if not 1 <= num_tokens <= self._sizes.max_decode_tokens:
            raise ValueError(
                f"num_tokens is {num_tokens}: steps of 1 to {self._sizes.max_decode_tokens} rows "
                "are recorded"
            )
        if active_bucket not in self.active_buckets:
            raise ValueError(f"active_bucket is {active_bucket}, not one of {self.active_buckets}")
        region = self._step
        self._wait_own()
        region.key = region.batch = None
        work = self._work(num_tokens, active_bucket, self._rank)
        region.use(work)
        region.slot_B.host[: work.num_blocks] = -1
        region.row_P.host[: work.num_blocks * work.block_rows] = -1
        self._flush_own()
        return self._make_batch(region, num_tokens, work, list(self._most_S))

    # ------------------------------------------------------------------------------------- at start

    def warm_up(self, num_scores: int) -> int:
        """Launch every kernel under every plan that a step may take, on rows of nobody: nothing is changed.

        So that the first step with an adapter, a longer prompt or an adapted head does not wait for a compiler.

        Args:
            num_scores: ids that the head computes.
        Returns:
            How many sets of plans there were.
        """
        whens = [entry.when for name in _TABLES for entry in self._plans.entries(name)]
        sizes = self._sizes
        ranks = {w.max_rank for w in whens if w.max_rank and w.max_rank < self._rank} | {self._rank}
        counts = {w.max_tokens for w in whens if w.max_tokens and w.max_tokens < sizes.max_tokens}
        seen = set()
        for num_rows in sorted(counts | {sizes.max_decode_tokens, sizes.max_tokens}):
            is_decode = num_rows <= sizes.max_decode_tokens
            for rank in (self._rank,) if is_decode else sorted(ranks):
                work = self._plan("decode" if is_decode else "prefill", num_rows, 1, rank)
                names = [work.embed.label]
                for plans in work.linears.values():
                    names += [plans.shrink.label, plans.expand.label]
                key = (work.phase, work.block_rows, *names)
                if key not in seen:
                    seen.add(key)
                    self._launch_nobody(work, num_scores)
        return len(seen)

    def _launch_nobody(self, work: _Work, num_scores: int) -> None:
        device, dtype = self._h.device, self.slots.kernel_view.weights.dtype
        route = LoraRoute(
            row_P=torch.full((work.block_rows,), -1, dtype=torch.int32, device=device),
            slot_B=torch.full((1,), -1, dtype=torch.int32, device=device),
            num_blocks=1,
            block_rows=work.block_rows,
        )
        batch = _TritonBatch(_TRIAL_ROWS, work, route, self._most_S, adapts_head=True)

        def rows(width: int) -> Tensor:
            return torch.zeros(_TRIAL_ROWS, width, dtype=dtype, device=device)

        for site, linear in self._linears.items():
            self.add(rows(sum(linear.widths)), rows(linear.num_inputs), 0, site, batch)
        token_T = torch.zeros(_TRIAL_ROWS, dtype=torch.int64, device=device)
        self.add_embedding(rows(self._hidden_size), token_T, batch)
        self.add_head(rows(num_scores), rows(self._hidden_size), batch)

    # -------------------------------------------------------------------------------------- plans

    def _make_batch(
        self, region: _Region, num_rows: int, work: _Work, rank_S: list[int]
    ) -> _TritonBatch:
        if work.phase == "decode":
            # As recorded, except that eagerly a site may be left out altogether.
            rank_S = [most if rank else 0 for most, rank in zip(self._most_S, rank_S, strict=True)]
        return _TritonBatch(
            num_rows=num_rows,
            work=work,
            route=LoraRoute(
                row_P=region.row_P.device,
                slot_B=region.slot_B.device,
                num_blocks=work.num_blocks,
                block_rows=work.block_rows,
            ),
            rank_S=tuple(rank_S),
            adapts_head=rank_S[self._head_index] > 0,
        )

    def _work(self, num_rows: int, active_bucket: int, max_rank: int) -> _Work:
        is_decode = num_rows <= self._sizes.max_decode_tokens
        # A recording is made before it is known who will come.
        rank = self._rank if is_decode else max_rank
        key = (num_rows, active_bucket, rank)
        work = self._works.get(key)
        if work is None:
            if len(self._works) >= _MAX_WORKS:
                self._works.clear()
            work = self._works[key] = self._plan("decode" if is_decode else "prefill", *key)
        return work

    def _plan(self, phase: Phase, num_rows: int, active_bucket: int, rank: int) -> _Work:
        block_rows, num_blocks = self._blocks(phase, num_rows, active_bucket)
        places = num_blocks * block_rows
        names = (
            ("lora_rows_shrink", "lora_rows_expand")
            if block_rows == 1
            else ("lora_shrink", "lora_expand")
        )
        linears = {}
        for linear in (*self._linears.values(), self._head):
            shrink = self._shrink_plan(names[0], phase, num_rows, rank, linear)
            spans, ranks = shrink.config["SPLIT_K"], self._rank * len(linear.widths)
            linears[linear] = _LinearPlans(
                shrink=shrink,
                expand=self._plans.choose(
                    names[1],
                    phase=phase,
                    tokens=num_rows,
                    rank=rank,
                    n=sum(linear.widths),
                    dtype=self._dtype,
                ),
                h_SPR=self._h[: spans * places * ranks].view(spans, places, ranks),
            )
        embed = self._plans.choose(
            "lora_embed",
            phase=phase,
            tokens=num_rows,
            rank=rank,
            n=self._hidden_size,
            dtype=self._dtype,
        )
        return _Work(phase, active_bucket, block_rows, num_blocks, linears, embed)

    def _shrink_plan(
        self, kernel: str, phase: Phase, num_rows: int, rank: int, linear: _Linear
    ) -> Plan:
        return self._plans.choose(
            kernel,
            phase=phase,
            tokens=num_rows,
            rank=rank,
            k=linear.num_inputs,
            dtype=self._dtype,
        )

    def _blocks(self, phase: Phase, num_rows: int, active_bucket: int) -> tuple[int, int]:
        """(rows of a block, blocks that suffice)."""
        route = self._plans.choose("lora_route", phase=phase, tokens=num_rows, dtype=self._dtype)
        block_rows = route.config["BLOCK_M"]
        return block_rows, num_blocks_for(num_rows, active_bucket, block_rows)

    def _largest_shapes(self) -> Iterator[tuple[int, int, int]]:
        """(blocks, places, numbers of h) at every row count where one of them may be largest.

        Between two bounds of the plans' entries all three grow with the rows.
        """
        sizes = self._sizes
        tables = ("lora_route", "lora_shrink", "lora_rows_shrink")
        bounds = {entry.when.max_tokens for name in tables for entry in self._plans.entries(name)}
        counts = {sizes.max_decode_tokens, sizes.max_tokens, *(bound for bound in bounds if bound)}
        for num_rows in sorted(counts):
            if num_rows > sizes.max_tokens:
                continue
            phase: Phase = "decode" if num_rows <= sizes.max_decode_tokens else "prefill"
            block_rows, num_blocks = self._blocks(phase, num_rows, sizes.num_slots)
            name = "lora_rows_shrink" if block_rows == 1 else "lora_shrink"
            places = num_blocks * block_rows
            for linear in (*self._linears.values(), self._head):
                # Plans may be bounded by rank; the spans of every rank that comes fit.
                for rank in range(padded_rank(1), self._rank + 1, padded_rank(1)):
                    plan = self._shrink_plan(name, phase, num_rows, rank, linear)
                    ranks = self._rank * len(linear.widths)
                    yield num_blocks, places, plan.config["SPLIT_K"] * places * ranks

    def _most_ranks(self, shape: ModelShape) -> Iterator[int]:
        """By site number, the largest rank over all slices that an adapter may have."""
        for index in range(num_sites(shape)):
            is_outside = index >= self._embedding_index
            linear = self._head if is_outside else self._linears[SITES[index % len(SITES)]]
            yield self._rank * len(linear.widths)

    def _bucket(self, num_active: int) -> int:
        return next(bucket for bucket in self.active_buckets if bucket >= num_active)

    def _wait_own(self) -> None:
        """Before the first write: the last copy may still be reading."""
        if self._own_staging is not None:
            self._own_staging.wait()

    def _flush_own(self) -> None:
        if self._own_staging is not None:
            self._own_staging.flush()


_TRIAL_ROWS: Final = 16
_TABLES: Final = (
    *("lora_route", "lora_shrink", "lora_expand", "lora_embed"),
    *("lora_rows_shrink", "lora_rows_expand"),
)
# Row counts of prefill vary freely; what is remembered of them is dropped now and then.
_MAX_WORKS: Final = 4096
