"""The timed seams of an engine: the objects between its parts, wrapped while a step is measured.

Everything is put back afterwards, so what is not measured runs exactly as it does without this module.
Where all layers of a step are one foreign call, that call reads a clock between its parts. What later gains a
method of its own counts as `decoder` until it is named here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any, Final

import numpy as np
from loraplex_kernels.cpu.layers import TIMED_PARTS

from loraplex_engine.gateway_port import GatewayPort
from loraplex_engine.model.linear import Linear
from loraplex_engine.model.native_layers import NativeLayers
from loraplex_engine.profiling.clock import PartClock
from loraplex_engine.runner import ModelRunner
from loraplex_engine.step_loop import Core, StepLoop

LINEAR: Final = "linear"
HEAD: Final = "lm_head"
ATTENTION: Final = "attention"
LORA: Final = "LoRA"
SMALL: Final = "norm, rope, activation"
DECODER: Final = "decoder, rest"
SAMPLING: Final = "sampling"
RUNNER: Final = "runner"
SCHEDULER: Final = "scheduler"
SEND: Final = "IPC: encode, send"

# In the order that they are shown.
ENGINE_PARTS: Final = (
    LINEAR,
    HEAD,
    ATTENTION,
    LORA,
    SMALL,
    DECODER,
    SAMPLING,
    RUNNER,
    SCHEDULER,
    SEND,
)

# As `TIMED_PARTS` are.
_LAYER_PARTS: Final = (LINEAR, ATTENTION, LORA, SMALL)
_OPS: Final = {"rms_norm": SMALL, "add_rms_norm": SMALL, "gated": SMALL}
_ATTENTION: Final = {"rotate_and_write": SMALL, "copy_blocks": RUNNER}
# What an object answers without computing anything: a call costs more to time than to make.
_FREE: Final = frozenset({"rows_for", "head_rows_for", "kv_bytes_per_block", "allocate_kv"})


@contextlib.contextmanager
def timed_engine(
    clock: PartClock, runner: ModelRunner, core: Core, loop: StepLoop, port: GatewayPort
) -> Iterator[None]:
    """Book every step's time on `clock` for as long as this is entered."""
    with contextlib.ExitStack() as undo:

        def wrap(target: Any, name: str, part: str) -> None:  # noqa: ANN401 - any object
            _set(undo, target, name, clock.timed(part, getattr(target, name)))

        def wrap_all(target: Any, names: dict[str, str], part: str) -> None:  # noqa: ANN401
            for name in dir(target):
                is_call = callable(getattr(target, name, None))
                if is_call and not name.startswith("_") and name not in _FREE:
                    wrap(target, name, names.get(name, part))

        model, forward_pass = runner.model, runner.forward_pass
        if model.has_fused_layers:
            assert isinstance(model._layer_call, NativeLayers)
            _time_inside(undo, clock, model._layer_call)
        else:
            layers = list(model.layers)
            for index, layer in enumerate(layers):
                model.layers[index] = _timed_layer(clock, layer)
            undo.callback(lambda: model.layers.__setitem__(slice(None), layers))
        _set(undo, model, "lm_head", TimedLinear(clock, HEAD, model.lm_head))
        wrap_all(model.ops, _OPS, DECODER)
        wrap_all(runner.attention, _ATTENTION, ATTENTION)
        if forward_pass._lora is not None:
            wrap_all(forward_pass._lora, {}, LORA)
        wrap(model._rotary, "gather", SMALL)
        wrap(forward_pass, "run", DECODER)
        wrap(runner._sampler, "prepare", SAMPLING)
        wrap(runner._sampler, "finish", SAMPLING)
        wrap(runner, "launch", RUNNER)
        wrap(core, "step", SCHEDULER)
        wrap(loop, "turn", SCHEDULER)
        wrap(port, "turn", SEND)
        yield


def _time_inside(undo: contextlib.ExitStack, clock: PartClock, call: NativeLayers) -> None:
    """Have the one call over all layers read the clock between its parts: nothing else of it changes."""
    seconds = np.zeros(len(TIMED_PARTS))

    def take_seconds() -> dict[str, float]:
        taken = dict(zip(_LAYER_PARTS, seconds.tolist(), strict=True))
        seconds.fill(0.0)
        return taken

    _set(undo, call, "part_seconds", seconds)
    _set(undo, call, "forward", clock.split(call.forward, take_seconds))


class TimedLinear:
    """A `Linear`, timed; everything else that is asked of it is the inner one's answer."""

    def __init__(self, clock: PartClock, part: str, inner: Linear) -> None:
        self._inner = inner
        self._call = clock.timed(part, inner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the inner one's
        """See `Linear`."""
        return self._call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - as the inner one's
        return getattr(self._inner, name)


def _timed_layer(clock: PartClock, layer: Any) -> Any:  # noqa: ANN401 - a dataclass with linears
    assert is_dataclass(layer)
    values = {field.name: getattr(layer, field.name) for field in fields(layer)}
    linears = {
        name: TimedLinear(clock, LINEAR, value)
        for name, value in values.items()
        if callable(value) and hasattr(value, "out_features")
    }
    return replace(layer, **linears)  # type: ignore[type-var] # an instance, not a class


def _set(undo: contextlib.ExitStack, target: Any, name: str, value: Any) -> None:  # noqa: ANN401
    """Set an attribute of an instance, and put back what was there, which may be the class's own."""
    own = vars(target)
    if name in own:
        undo.callback(setattr, target, name, own[name])
    else:
        undo.callback(delattr, target, name)
    setattr(target, name, value)
