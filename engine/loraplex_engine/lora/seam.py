"""The seam between the decoder and LoRA: what the model asks of a backend, and nothing else.

The model knows neither adapters nor slots: it runs a linear and offers its output to the backend,
    y_TN = linear(x_TK)
    if batch is not None: backend.add(y_TN, x_TK, layer, site, batch)
and the backend adds each adapter row's delta in place. The embedding and the head have a call of their
own: the one has token ids for input, the other runs on the sampled rows only, with a batch of those.

T tokens of the step, K inputs and N outputs of the (possibly merged) linear, R sampled rows, V
vocabulary, H hidden size.
"""

from __future__ import annotations

from typing import Literal, Protocol, runtime_checkable

from torch import Tensor

from loraplex_engine.step import Int32Array

LoraSite = Literal["qkv", "o", "gate_up", "down"]

# The Hugging Face modules behind a merged linear, in the order of their output slices.
SITE_SLICES: dict[LoraSite, tuple[str, ...]] = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}


class LoraBatch(Protocol):
    """What a backend needs to know of a step; made by `prepare`, opaque to the model."""


class LoraBackend(Protocol):
    """Adds low-rank deltas: y += scale * (x A^T) B^T, each row with its own adapter.

    Accumulates in fp32 and rounds once into y. A row's result depends on its own x and adapter only,
    bit for bit; rows without an adapter are not touched at all.
    """

    def prepare(
        self, slot_T: Int32Array, pool_version: int, *, of_head: bool = False
    ) -> LoraBatch | None:
        """Sort out once per step which token uses which slot; None: no token has an adapter.

        A step has up to two batches, of all its tokens and, for `add_head`, of the rows that sample. Both
        are prepared before either is used, each at most once: what a device backend sends up for the one
        must not overwrite the other's. Where every row of the step samples, in order, the step's own batch
        serves `add_head` just as well.

        Args:
            slot_T: per token of the step, in the order of the model's rows; -1: base.
            pool_version: of the slot table whose weights the step must see.
            of_head: the batch is for `add_head`, else for `add` and `add_embedding`.
        """
        ...

    def add(self, y_TN: Tensor, x_TK: Tensor, layer: int, site: LoraSite, batch: LoraBatch) -> None:
        """Add the deltas of (layer, site) to `y_TN` in place.

        Args:
            y_TN: output of the linear, model dtype, contiguous; N covers all slices of the site.
            x_TK: input of the linear, model dtype, contiguous.
        """
        ...

    def add_embedding(self, y_TH: Tensor, token_T: Tensor, batch: LoraBatch) -> None:
        """Add the embedding's deltas to `y_TH` in place.

        Args:
            y_TH: embedded tokens, model dtype, contiguous.
            token_T: their ids, int64, contiguous.
        """
        ...

    def adapts_head(self, batch: LoraBatch) -> bool:
        """Whether some adapter of the batch adapts lm_head; if not, there is no need of `add_head`."""
        ...

    def add_head(self, y_RV: Tensor, x_RH: Tensor, batch: LoraBatch) -> None:
        """Add the deltas of lm_head to logits, in place.

        Args:
            y_RV: logits, model dtype, contiguous; V may end before the vocabulary's padding ids.
            x_RH: the head's input, model dtype, contiguous.
            batch: of these R rows.
        """
        ...


@runtime_checkable
class CapturableLora(LoraBackend, Protocol):
    """A backend whose launches may be recorded once and replayed for other steps.

    What is launched depends on three things only: the step's number of rows (padding counted), its active
    bucket, and whether `add_head` is called. Rows, slots and weights lie at fixed device addresses.
    """

    @property
    def device_bytes(self) -> int:
        """Memory that it keeps on the device: adapters' slots and workspace."""
        ...

    @property
    def active_buckets(self) -> tuple[int, ...]:
        """What `active_bucket` may say, ascending: 1, 2, 4, ..., the number of slots."""
        ...

    def active_bucket(self, batch: LoraBatch) -> int:
        """The batch's number of distinct adapters, rounded up to a bucket."""
        ...

    def warm_up(self, num_scores: int) -> int:
        """Launch every kernel under every plan that a step may take, changing nothing.

        Args:
            num_scores: ids that the head computes.
        Returns:
            How many sets of plans there were.
        """
        ...

    def capture_batch(self, num_tokens: int, active_bucket: int) -> LoraBatch:
        """A batch that stands for every step of `num_tokens` rows and this bucket, while recording.

        It launches for every site, whatever adapters target, and has no row with an adapter: what runs
        while recording changes nothing. Replaced by the next `prepare`.

        Raises:
            ValueError: more rows than a decoding step has, or no such bucket.
        """
        ...
