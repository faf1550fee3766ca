"""Adapters in device slots: copied once, swapped under recordings, and the same deltas whatever plan is chosen."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from loraplex_engine.artifact import AdapterArtifact, AdapterStore, ArtifactError, ModelShape
from loraplex_engine.device.staging import Staging
from loraplex_engine.lora import triton_backend
from loraplex_engine.lora.backend import TorchLora
from loraplex_engine.lora.device_slots import DeviceAdapter, DeviceSlots, pack_device, slot_size
from loraplex_engine.lora.seam import CapturableLora, LoraBackend, LoraBatch
from loraplex_engine.lora.setup import LoraDevice, open_lora
from loraplex_engine.lora.sites import SITES, site_layouts
from loraplex_engine.lora.triton_backend import TritonLora, TritonLoraSizes
from loraplex_engine.lora.weights import pack_torch
from loraplex_kernels.lora_route import LoraRoute
from loraplex_kernels.plans import Column, Plan, PlanTable, open_plans
from torch import Tensor

from tests.support.adapter_files import ALL_LINEARS, OUTSIDE, make_adapter
from tests.support.lora_inputs import FEW_PROGRAMS
from tests.support.recorded_graph import RecordingBackend

SHAPE = ModelShape(
    num_layers=1,
    hidden_size=32,
    intermediate_size=48,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    vocab_size=40,
)
CPU = torch.device("cpu")
MODULES = [*ALL_LINEARS, *OUTSIDE]


class Slots:
    """A pool that holds what it is given."""

    def __init__(self, packed: Sequence[DeviceAdapter]) -> None:
        self.packed = list(packed)

    def weights(self, slot: int) -> DeviceAdapter:
        return self.packed[slot]


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> list[AdapterArtifact]:
    root = tmp_path_factory.mktemp("adapters")
    return [
        make_adapter(root / "0", SHAPE, rank=8, linears=MODULES, seed=0),
        make_adapter(root / "1", SHAPE, rank=5, linears=MODULES, seed=1, dtype="F32"),
        make_adapter(root / "2", SHAPE, rank=3, linears=["q_proj", "down_proj"], seed=2),
        make_adapter(root / "3", SHAPE, rank=16, linears=MODULES, seed=3, dtype="F16"),
    ]


def pack(artifact: AdapterArtifact, dtype: torch.dtype = torch.float32) -> DeviceAdapter:
    return pack_device(artifact, SHAPE, dtype=dtype, pin=False)


def open_backend(
    slots: Slots,
    *,
    plans: PlanTable = FEW_PROGRAMS,
    dtype: torch.dtype = torch.float32,
    staging: Staging | None = None,
) -> TritonLora:
    return TritonLora(
        slots,
        SHAPE,
        TritonLoraSizes(
            num_slots=len(slots.packed), max_rank=16, max_tokens=40, max_decode_tokens=8
        ),
        dtype=dtype,
        device=CPU,
        plans=plans,
        staging=staging,
    )


def slot_array(slots: Sequence[int]) -> np.ndarray:
    return np.array(slots, np.int32)


class Step:
    """Inputs of every site for some rows, and what a backend makes of them."""

    def __init__(self, num_rows: int, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(num_rows)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        self.token_T = torch.randint(0, SHAPE.vocab_size, (num_rows,), generator=generator)
        self.hidden_TH = draw(num_rows, SHAPE.hidden_size)
        self.logits_TV = draw(num_rows, SHAPE.vocab_size - 3)
        self.sites = {
            layout.site: (draw(num_rows, layout.num_outputs), draw(num_rows, layout.num_inputs))
            for layout in site_layouts(SHAPE)
        }

    def run(self, backend: LoraBackend, batch: LoraBatch) -> list[Tensor]:
        """Embedding, the four sites, head."""
        hidden_TH = self.hidden_TH.clone()
        backend.add_embedding(hidden_TH, self.token_T, batch)
        results = [hidden_TH]
        for site in SITES:
            y_TN, x_TK = self.sites[site]
            results.append(y_TN.clone())
            backend.add(results[-1], x_TK, 0, site, batch)
        results.append(self.logits_TV.clone())
        backend.add_head(results[-1], self.hidden_TH, batch)
        return results


def equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


# ------------------------------------------------------------------------------------------- slots


def test_a_slot_holds_the_largest_adapter_and_no_byte_less(tmp_path: Path) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        largest = make_adapter(tmp_path / str(dtype), SHAPE, rank=16, linears=MODULES)
        needed = pack(largest, dtype).image.numel()

        size = slot_size(SHAPE, 16, dtype)

        assert 0 <= size - needed < 256
        slots = DeviceSlots(SHAPE, num_slots=2, max_rank=16, dtype=dtype, device=CPU)
        assert slots.size_bytes == 2 * size
    larger = make_adapter(tmp_path / "larger", SHAPE, rank=17, linears=MODULES)
    with pytest.raises(ValueError, match="--max-lora-rank"):
        slots.hold(0, pack(larger, torch.bfloat16))


def test_an_adapter_is_copied_once_until_its_slot_gets_another_one(
    artifacts: list[AdapterArtifact],
) -> None:
    first, second = pack(artifacts[0]), pack(artifacts[1])
    slots = Slots([first, second])
    backend = open_backend(slots)
    uploads = []
    for version, rows in ((0, [0]), (0, [0, 0]), (0, [0, 1]), (1, [0, 1]), (1, [1])):
        assert backend.prepare(slot_array(rows), version) is not None
        uploads.append(backend.slots.uploads_total)

    assert uploads == [1, 1, 2, 2, 2]
    assert backend.slots.uploaded_bytes_total == first.image.numel() + second.image.numel()
    slots.packed.reverse()
    backend.prepare(slot_array([0]), 2)
    assert backend.slots.uploads_total == 3
    slots.packed[0] = pack(artifacts[1])  # loaded again after eviction: another packing
    backend.prepare(slot_array([0]), 3)
    assert backend.slots.uploads_total == 4


def test_an_evicted_adapter_leaves_host_memory_at_once(artifacts: list[AdapterArtifact]) -> None:
    slots = Slots([pack(artifacts[0])])
    backend = open_backend(slots)
    backend.prepare(slot_array([0]), 0)
    image = weakref.ref(slots.packed[0].image)

    slots.packed.clear()
    gc.collect()

    assert image() is None


def test_weights_beyond_float16_are_refused_with_a_remedy(tmp_path: Path) -> None:
    artifact = make_adapter(tmp_path / "huge", SHAPE, size=1e6)

    with pytest.raises(ArtifactError, match="bfloat16"):
        pack(artifact, torch.float16)
    assert pack(artifact, torch.bfloat16).image.numel()


# ------------------------------------------------------------------------------------------ deltas


@pytest.mark.parametrize(
    ("column", "rows"),
    [
        pytest.param("fast", [1], id="fast, one row", marks=pytest.mark.slow),
        pytest.param("fast", [0, -1, 3, 0], id="fast, rows"),
        pytest.param("fast", [2, -1, 0, 3, 0, 1], id="fast, decode", marks=pytest.mark.slow),
        pytest.param("fast", [*[0] * 9, -1, 1, 3, 2, *[1] * 5], id="fast, prefill"),
        pytest.param("invariant", [0, -1, 3, 0], id="invariant"),
    ],
)
def test_every_plan_gives_the_deltas_of_the_torch_backend(
    artifacts: list[AdapterArtifact], column: Column, rows: list[int]
) -> None:
    backend = open_backend(Slots([pack(a) for a in artifacts]), plans=open_plans("sm_90", column))
    torch_slots = Slots([pack_torch(a, SHAPE) for a in artifacts])  # type: ignore[misc]
    oracle = TorchLora(torch_slots, SHAPE)  # type: ignore[arg-type]
    step = Step(len(rows))
    batch, oracle_batch = (one.prepare(slot_array(rows), 0) for one in (backend, oracle))
    assert batch is not None
    assert oracle_batch is not None

    results = step.run(backend, batch)

    for result, wanted in zip(results, step.run(oracle, oracle_batch), strict=True):
        torch.testing.assert_close(result, wanted, rtol=1e-4, atol=1e-4)
    assert backend.adapts_head(batch) is oracle.adapts_head(oracle_batch)


def test_the_heads_batch_leaves_that_of_the_step_as_it_is(
    artifacts: list[AdapterArtifact],
) -> None:
    """Both are prepared before either is used, and go up in one copy."""
    staging = Staging(CPU)
    slots = Slots([pack(a) for a in artifacts])
    backend = open_backend(slots, staging=staging)
    staging.seal()
    alone = open_backend(slots)
    rows, sampled = [0, 0, 1, 0], [0, 2]
    step, head = Step(4), Step(2)

    batch = backend.prepare(slot_array(rows), 0)
    head_batch = backend.prepare(slot_array([rows[row] for row in sampled]), 0, of_head=True)
    assert batch is not None
    assert head_batch is not None
    staging.flush()

    for one, work, slot_T in ((batch, step, rows), (head_batch, head, [0, 1])):
        expected_batch = alone.prepare(slot_array(slot_T), 0)
        assert expected_batch is not None
        assert equal(work.run(backend, one), work.run(alone, expected_batch))
    # A repeated step is remembered and goes up again all the same.
    assert backend.prepare(slot_array(rows), 0) is batch
    assert staging.flush() > 0


# --------------------------------------------------------------------------------------- recording


def test_a_recording_serves_other_rows_and_other_adapters(
    artifacts: list[AdapterArtifact],
) -> None:
    """Replay equals an eager step bit for bit while rows change and an adapter is swapped for another."""
    slots = Slots([pack(a, torch.bfloat16) for a in artifacts[:3]])
    backend = open_backend(slots, dtype=torch.bfloat16)
    assert isinstance(backend, CapturableLora)
    step = Step(6, torch.bfloat16)
    before = [tensor.clone() for tensor in (step.hidden_TH, *(y for y, _ in step.sites.values()))]
    results: list[list[Tensor]] = []
    stand_in = backend.capture_batch(6, 3)

    graph = RecordingBackend().capture(lambda: results.append(step.run(backend, stand_in)))
    results_of_capture = results[-1]

    assert equal(results_of_capture[:1], before[:1]), "nobody has an adapter while recording"
    for version, rows in enumerate(([0, 1, 2, -1, 0, 0], [2, 2, -1, 1, 0, -1], [1, 0, 2, 1, 1, 1])):
        if version == 2:
            slots.packed[1] = pack(artifacts[3], torch.bfloat16)
        batch = backend.prepare(slot_array(rows), version)
        assert batch is not None
        assert backend.active_bucket(batch) == 3
        graph.replay()
        replayed = [tensor.clone() for tensor in results_of_capture]

        assert equal(replayed, step.run(backend, batch)), rows


def test_buckets_of_adapters_and_what_may_be_recorded(artifacts: list[AdapterArtifact]) -> None:
    backend = open_backend(Slots([pack(artifacts[0])] * 6))

    assert backend.active_buckets == (1, 2, 4, 6)
    for rows, bucket in (([5], 1), ([0, 1, 1], 2), ([0, 1, 2], 4), ([0, 1, 2, 3, 4], 6)):
        batch = backend.prepare(slot_array(rows), 0)
        assert batch is not None
        assert backend.active_bucket(batch) == bucket
    with pytest.raises(ValueError, match="num_tokens is 9"):
        backend.capture_batch(9, 1)
    with pytest.raises(ValueError, match="active_bucket is 3"):
        backend.capture_batch(4, 3)
    assert open_backend(Slots([pack(artifacts[0])])).active_buckets == (1,)


def test_any_step_up_to_the_limits_fits_what_was_reserved(
    artifacts: list[AdapterArtifact],
) -> None:
    columns: tuple[Column, ...] = ("fast", "invariant")
    for column in columns:
        backend = open_backend(Slots([pack(artifacts[3])] * 5), plans=open_plans("sm_90", column))
        random = np.random.default_rng(0)
        for num_rows in range(1, 41):
            for num_slots in (1, 5):
                rows = random.integers(0, num_slots, num_rows).astype(np.int32)
                assert backend.prepare(rows, 0) is not None
                assert backend.prepare(rows, 0, of_head=True) is not None
        with pytest.raises(ValueError, match="reserved"):
            backend.prepare(np.zeros(4000, np.int32), 0)


# ------------------------------------------------------------------------------------------- setup


def test_adapters_from_a_store_arrive_in_slots(tmp_path: Path) -> None:
    artifact = make_adapter(tmp_path / "a", SHAPE, rank=4, linears=MODULES)
    staging = Staging(CPU)
    lora = open_lora(
        store_url=f"file://{tmp_path}/store",
        shape=SHAPE,
        cache_dir=tmp_path / "cache",
        max_loras=2,
        max_lora_rank=8,
        backend="triton",
        on_device=LoraDevice(
            device=CPU,
            dtype=torch.float32,
            plans=FEW_PROGRAMS,
            staging=staging,
            max_tokens=16,
            max_decode_tokens=4,
        ),
    )
    staging.seal()
    AdapterStore(f"file://{tmp_path}/store").put(tmp_path / "a", artifact.digest)
    loaded = threading.Event()
    lora.pool.loader.on_loaded = loaded.set
    lora.pool.prefetch(artifact.digest)
    assert loaded.wait(30)
    slot = lora.pool.lease(artifact.digest)
    assert slot is not None
    step = Step(2)

    batch = lora.backend.prepare(slot_array([slot, -1]), lora.pool.version)
    staging.flush()

    assert batch is not None
    expected = open_backend(Slots([pack(artifact)]))
    expected_batch = expected.prepare(slot_array([0, -1]), 0)
    assert expected_batch is not None
    assert equal(step.run(lora.backend, batch), step.run(expected, expected_batch))
    assert lora.name == "triton"
    assert lora.device_bytes > 2 * slot_size(SHAPE, 8, torch.float32)
    assert lora.pool.stats().host_bytes == pack(artifact).size_bytes
    lora.pool.close()


def test_a_backend_that_does_not_go_with_the_device_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs a device"):
        open_lora(
            store_url=f"file://{tmp_path}/store",
            shape=SHAPE,
            cache_dir=tmp_path,
            backend="triton",
        )


_KERNELS = ("lora_shrink", "lora_expand", "lora_rows_shrink", "lora_rows_expand", "lora_embed")


@pytest.mark.parametrize("column", ["fast", "invariant"])
def test_warming_up_launches_every_plan_that_a_step_may_take(
    column: Column, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: set[tuple[str, int, str]] = set()
    for name in _KERNELS:

        def launch(*args: object, kernel: str = name, **_: object) -> None:
            plan = next(arg for arg in args if isinstance(arg, Plan))
            route = next(arg for arg in args if isinstance(arg, LoraRoute))
            assert route.slot_B.eq(-1).all()
            launched.add((kernel, route.block_rows, plan.label))

        monkeypatch.setattr(triton_backend, name, launch)
    sizes = TritonLoraSizes(num_slots=2, max_rank=64, max_tokens=3000, max_decode_tokens=80)
    backend = TritonLora(
        Slots([]), SHAPE, sizes, dtype=torch.bfloat16, device=CPU, plans=open_plans("sm_90", column)
    )

    backend.warm_up(SHAPE.vocab_size)

    expected = set()
    for num_rows in range(1, sizes.max_tokens + 1):
        for rank in (16, 32, 48, 64):
            work = backend._work(num_rows, 1, rank)
            names = _KERNELS[2:4] if work.block_rows == 1 else _KERNELS[:2]
            expected.add(("lora_embed", work.block_rows, work.embed.label))
            for plans in work.linears.values():
                expected |= {
                    (names[0], work.block_rows, plans.shrink.label),
                    (names[1], work.block_rows, plans.expand.label),
                }
    assert launched == expected
    assert len(expected) > (5 if column == "fast" else 2)


def test_warming_up_changes_nothing_and_a_buffer_of_its_own_is_waited_for(
    artifacts: list[AdapterArtifact],
) -> None:
    backend = open_backend(Slots([pack(artifacts[0])]))
    step = Step(3)
    before = step.run(backend, backend.prepare(slot_array([0, -1, 0]), 1))

    assert backend.warm_up(SHAPE.vocab_size - 3) >= 1

    waits = 0

    def wait() -> None:
        nonlocal waits
        waits += 1

    assert backend._own_staging is not None
    backend._own_staging.wait = wait  # type: ignore[method-assign]
    after = step.run(backend, backend.prepare(slot_array([0, -1, 0]), 2))
    assert all(map(torch.equal, before, after))
    assert waits == 1
    backend.capture_batch(2, 1)
    assert waits == 2
