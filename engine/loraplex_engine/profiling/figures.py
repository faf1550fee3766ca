"""What a profile says, as data: the JSON of `loraplex bench profile --json`, and the tables of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal

import msgspec

from loraplex_engine.profiling.machine import MachineFigures
from loraplex_engine.profiling.seams import ENGINE_PARTS

# What the gateway measured of itself, a process of its own; in the order that they are shown.
RECEIVE: Final = "IPC: receive, decode"
DETOKENIZE: Final = "gateway: detokenize"
SSE: Final = "gateway: JSON, SSE, HTTP"
OTHER: Final = "idle, other"
PARTS: Final = (*ENGINE_PARTS, RECEIVE, DETOKENIZE, SSE, OTHER)


class GatewayFigures(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """CPU of a gateway that streams to `batch` clients, per step of the engine."""

    batch: int
    receive_ms: float
    detokenize_ms: float
    stream_ms: float


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One part of a step."""

    name: str
    ms: float
    percent: float  # of the step
    floor_ms: float | None = None  # None: it has none
    roofline_percent: float | None = None  # floor / time


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of step. `step_ms` is the sum of its parts, the gateway's included.

    The gateway is a process of its own and works while the engine computes the next step, so a server's steps
    may follow each other faster than that.
    """

    phase: Literal["decode", "prefill"]
    batch: int
    tokens: int  # computed in the step
    context: int  # tokens before them, in each row
    adapters: int  # distinct ones in the step
    step_ms: float
    engine_ms: float  # without the gateway
    plain_engine_ms: float  # the same, not instrumented
    floor_ms: float
    roofline_percent: float
    tokens_per_s: float
    parts: list[Part]


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """Everything."""

    model: str
    dtype: str
    backends: dict[str, str]
    machine: MachineFigures
    # All layers are one foreign call, which reads a clock between its parts while it is timed.
    has_fused_layers: bool = False
    cases: list[Case]


def format_profile(profile: Profile) -> str:
    """The tables: a block per phase and number of adapters, a column per batch."""
    machine = profile.machine
    backends = ", ".join(f"{name} {backend}" for name, backend in profile.backends.items())
    lines = [
        f"{profile.model}, {profile.dtype}; {backends}",
        f"This machine: {machine.read_gb_s:.1f} GB/s read, {machine.gemm_gflop_s:.0f} GFLOP/s"
        f" {machine.gemm_dtype}, {machine.num_threads} threads",
        "ms of a step, its share of the step, and floor / time (roof: bytes over that bandwidth, FLOPs over"
        " that peak).",
        "step: the parts added up. The gateway's run in another process, beside the engine's next step: a server's"
        " steps may follow faster.",
    ]
    if profile.has_fused_layers:
        lines.append(
            "All layers run in one call, timed inside: the parts are those of the path that serves."
        )
    blocks: dict[tuple[str, bool], list[Case]] = {}
    for case in profile.cases:
        blocks.setdefault((case.phase, case.adapters > 0), []).append(case)
    for (phase, _), cases in blocks.items():
        lines += ["", *_block(phase, cases)]
    return "\n".join(line.rstrip() for line in lines)


def _block(phase: str, cases: Sequence[Case]) -> list[str]:
    heads = [
        f"{phase} {case.tokens}" if phase == "prefill" else f"batch {case.batch}" for case in cases
    ]
    adapters = "/".join(str(case.adapters) for case in cases)
    title = f"{phase}, context {cases[0].context}, adapters {adapters}"
    lines = [
        f"{title:26}",
        f"{'':26}" + "".join(f"{head:>24}" for head in heads),
        f"{'':26}" + f"{'ms':>10}{'%':>7}{'roof':>7}" * len(cases),
    ]
    by_name: list[Mapping[str, Part]] = [{part.name: part for part in c.parts} for c in cases]
    for name in PARTS:
        row = [parts.get(name) for parts in by_name]
        if any(part is not None for part in row):
            lines.append(f"  {name:24}" + "".join(_cells(part) for part in row))
    lines.append(
        f"  {'step':24}"
        + "".join(f"{c.step_ms:10.2f}{100:7.1f}{c.roofline_percent:6.0f}%" for c in cases)
    )
    lines.append(f"  {'tokens/s':24}" + "".join(f"{c.tokens_per_s:10.1f}{'':14}" for c in cases))
    lines.append(f"  {'engine, parts':24}" + "".join(f"{c.engine_ms:10.2f}{'':14}" for c in cases))
    lines.append(
        f"  {'engine, not timed inside':24}"
        + "".join(f"{c.plain_engine_ms:10.2f}{'':14}" for c in cases)
    )
    return lines


def _cells(part: Part | None) -> str:
    if part is None:
        return f"{'-':>10}{'-':>7}{'-':>7}"
    roof = "-" if part.roofline_percent is None else f"{part.roofline_percent:.0f}%"
    return f"{part.ms:10.3f}{part.percent:7.1f}{roof:>7}"
