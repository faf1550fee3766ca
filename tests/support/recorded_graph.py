"""CUDA graphs without CUDA: records what a function launches, and replays that list on the same tensors.

What a recording may not depend on shows up as it would on a GPU, or louder:

* a number that Python worked out while recording (a length, a grid, a choice of kernel) is in the list as it
  was, so a replay for another step answers as for the recorded one;
* a tensor that was made outside of the recording is remembered by its storage alone: once its owner has dropped
  it, replaying raises, where a GPU would read whatever has come to lie there;
* reading a value back (`item`, a shape that depends on data) raises while recording, as under CUDA;
* memory allocated but not written while recording is filled with NaN before each replay.

Aten operations are seen by a `TorchDispatchMode`; Triton launches (interpreted) where they are started.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

_aten = torch.ops.aten
_READS_BACK = (
    _aten._local_scalar_dense.default,
    _aten.nonzero.default,
    _aten.is_nonzero.default,
    _aten.equal.default,
)
_ALLOCATES = {
    _aten.empty.memory_format,
    _aten.empty_strided.default,
    _aten.empty_like.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}


class CaptureError(RuntimeError):
    """Something that a CUDA graph cannot record, or cannot replay any more."""


@dataclass(frozen=True)
class _Outside:
    """A tensor that the recording did not make: where it lay, without keeping it alive."""

    storage: StorageWeakRef
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]
    number: (
        Tensor | None
    )  # of a Python number that torch wrapped, which is an argument like any other

    @classmethod
    def of(cls, tensor: Tensor) -> _Outside:
        return cls(
            StorageWeakRef(tensor.untyped_storage()),
            tensor.dtype,
            tensor.storage_offset(),
            tensor.size(),
            tensor.stride(),
            tensor.clone() if tensor.dim() == 0 else None,
        )

    def open(self, who: str) -> Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        if storage is None and self.number is not None:
            return self.number
        if storage is None:
            raise CaptureError(f"{who} reads a tensor that was made before recording and is gone")
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        return tensor.set_(storage, self.offset, self.size, self.stride)


@dataclass
class _Launch:
    """One entry of the list; arguments made outside are `_Outside`."""

    name: str
    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    fresh: list[tuple[int, Tensor]]  # (place among the results, the recorded result to overwrite)


@dataclass
class RecordedGraph:
    """A list of launches."""

    launches: list[_Launch] = field(default_factory=list)

    def names(self) -> list[str]:
        """What was launched, in order."""
        return [launch.name for launch in self.launches]

    def replay(self) -> None:
        """Run the list; results land in the tensors that recording made."""
        for launch in self.launches:

            def reopen(outside: _Outside, who: str = launch.name) -> Tensor:
                return outside.open(who)

            args, kwargs = tree_map_only(_Outside, reopen, (launch.args, launch.kwargs))
            results = tree_leaves(launch.run(*args, **kwargs))
            for place, target in launch.fresh:
                target.copy_(results[place])


class _Recorder(TorchDispatchMode):
    def __init__(self, graph: RecordedGraph) -> None:
        super().__init__()
        self._graph = graph
        self._inside: dict[int, Tensor] = {}  # storage address -> one tensor, which keeps it alive
        self._is_launching = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._is_launching:
            return func(*args, **kwargs)
        name = str(func)
        if func in _READS_BACK:
            raise CaptureError(f"{name} reads a value back while recording")
        before = {t.untyped_storage().data_ptr() for t in self._tensors((args, kwargs))}
        out = func(*args, **kwargs)
        results = tree_leaves(out)
        fresh = [
            (place, result)
            for place, result in enumerate(results)
            if isinstance(result, Tensor) and result.untyped_storage().data_ptr() not in before
        ]
        for _, result in fresh:
            self._inside[result.untyped_storage().data_ptr()] = result
        if func in _ALLOCATES:
            for _, result in fresh:
                self._poison(result)
        elif fresh or func._schema.is_mutable:
            self._append(name, func, args, kwargs, fresh)
        # What is left makes a view: recorded tensors keep theirs.
        return out

    @contextlib.contextmanager
    def launching(self) -> Iterator[None]:
        """What the interpreter itself asks of torch is no part of the recording."""
        self._is_launching = True
        try:
            yield
        finally:
            self._is_launching = False

    def add_kernel(self, name: str, run: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self._append(f"triton.{name}", run, args, kwargs, [])

    def _poison(self, result: Tensor) -> None:
        if result.is_floating_point():
            result.fill_(float("nan"))
            self._append("poison", _aten.fill_.Scalar, (result, float("nan")), {}, [])

    def _append(
        self, name: str, run: Any, args: Any, kwargs: Any, fresh: list[tuple[int, Tensor]]
    ) -> None:
        args, kwargs = tree_map_only(Tensor, self._remember, (args, kwargs))
        self._graph.launches.append(_Launch(name, run, args, kwargs, fresh))

    def _remember(self, tensor: Tensor) -> Tensor | _Outside:
        if tensor.untyped_storage().data_ptr() in self._inside:
            return tensor
        return _Outside.of(tensor)

    @staticmethod
    def _tensors(tree: Any) -> list[Tensor]:
        return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


class RecordingBackend:
    """`device.graphs.GraphBackend` on a CPU; `graphs` are its recordings, in order."""

    def __init__(self) -> None:
        self.graphs: list[RecordedGraph] = []
        self._lock = threading.Lock()

    def capture(self, run: Callable[[], None]) -> RecordedGraph:
        run()
        graph = RecordedGraph()
        recorder = _Recorder(graph)
        with self._lock, _watched_triton(recorder), recorder:
            run()
        self.graphs.append(graph)
        return graph


@contextlib.contextmanager
def _watched_triton(recorder: _Recorder) -> Iterator[None]:
    """Have every interpreted launch tell the recorder."""
    from triton.runtime.interpreter import InterpretedFunction

    original = InterpretedFunction.run

    def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        def launch(*args: Any, **kwargs: Any) -> Any:
            return original(kernel, *args, **kwargs)

        recorder.add_kernel(kernel.fn.__name__, launch, args, kwargs)
        with recorder.launching():
            return launch(*args, **kwargs)

    InterpretedFunction.run = run  # type: ignore[method-assign]  # for as long as it records
    try:
        yield
    finally:
        InterpretedFunction.run = original  # type: ignore[method-assign]
