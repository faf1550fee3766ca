"""`loraplex plan`: memory, machines and money for a workload, before anything is bought."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from loraplex_platform.cli.errors import CommandError
from loraplex_platform.cli.output import OneJsonOption

if TYPE_CHECKING:
    from loraplex_platform.planning.capacity import Capacity, Machine, Model, Workload
    from loraplex_platform.planning.cost import Cost, Verdict

DTypeName = Literal["bfloat16", "float32"]
KvName = Literal["auto", "int8", "fp8"]
QuantizationName = Literal["none", "int8", "int4"]

_WORKLOAD = "The workload"
_MACHINE = "The machine"
_MONEY = "Money"


def plan(
    model: Annotated[
        str, typer.Argument(help="A Hugging Face folder (config.json is enough), or smollm2-135m.")
    ] = "smollm2-135m",
    tokens_per_second: Annotated[
        float,
        typer.Option(help="Output tokens/s at the peak.", rich_help_panel=_WORKLOAD),
    ] = 500.0,
    mean_share: Annotated[
        float,
        typer.Option(help="Mean load over a month, of the peak.", rich_help_panel=_WORKLOAD),
    ] = 0.3,
    prompt_tokens: Annotated[
        float, typer.Option(help="Of a request, on the average.", rich_help_panel=_WORKLOAD)
    ] = 500.0,
    output_tokens: Annotated[
        float, typer.Option(help="Of a request, on the average.", rich_help_panel=_WORKLOAD)
    ] = 200.0,
    cached_share: Annotated[
        float,
        typer.Option(help="Of prompt tokens, in the prefix cache.", rich_help_panel=_WORKLOAD),
    ] = 0.0,
    tenants: Annotated[
        int, typer.Option(min=1, max=10**9, help="How many.", rich_help_panel=_WORKLOAD)
    ] = 100,
    adapters_per_tenant: Annotated[
        float, typer.Option(help="On the average.", rich_help_panel=_WORKLOAD)
    ] = 1.0,
    active_adapters: Annotated[
        int | None,
        typer.Option(
            min=0,
            show_default="a tenth of all",
            help="Adapters that are asked for at the same time.",
            rich_help_panel=_WORKLOAD,
        ),
    ] = None,
    ranks: Annotated[
        str, typer.Option(help="Of the adapters, in equal parts.", rich_help_panel=_WORKLOAD)
    ] = "8,16,64",
    modules: Annotated[
        str | None,
        typer.Option(
            show_default="all seven",
            help="Linear layers they adapt, such as q_proj,v_proj.",
            rich_help_panel=_WORKLOAD,
        ),
    ] = None,
    dtype: Annotated[
        DTypeName, typer.Option(help="Of the engine.", rich_help_panel=_MACHINE)
    ] = "bfloat16",
    quantization: Annotated[
        QuantizationName, typer.Option(help="Of the engine, on a CPU.", rich_help_panel=_MACHINE)
    ] = "none",
    kv_cache_dtype: Annotated[
        KvName, typer.Option(help="Of the engine, on a GPU.", rich_help_panel=_MACHINE)
    ] = "auto",
    machine: Annotated[
        str,
        typer.Option(
            help="l4, l40s, a100, h100 or h200; or cpu or gpu, with the next three flags.",
            rich_help_panel=_MACHINE,
        ),
    ] = "h100",
    memory_gib: Annotated[
        float | None, typer.Option(help="Of one machine.", rich_help_panel=_MACHINE)
    ] = None,
    read_gb_s: Annotated[
        float | None,
        typer.Option(help="What it reads of its memory a second.", rich_help_panel=_MACHINE),
    ] = None,
    tflops: Annotated[
        float | None,
        typer.Option(help="Dense products, in the dtype.", rich_help_panel=_MACHINE),
    ] = None,
    rows: Annotated[
        int | None,
        typer.Option(
            min=1,
            show_default="the engine's: 64 on a CPU, 256 on a GPU",
            help="Requests one machine runs at once.",
            rich_help_panel=_MACHINE,
        ),
    ] = None,
    measured_tokens_per_second: Annotated[
        float | None,
        typer.Option(
            show_default="estimated from what the machine reads and multiplies",
            help="Output tokens/s of one machine at this workload: measure it.",
            rich_help_panel=_MACHINE,
        ),
    ] = None,
    efficiency: Annotated[
        float,
        typer.Option(help="Share of the estimate that is reached.", rich_help_panel=_MACHINE),
    ] = 0.5,
    spare: Annotated[
        int,
        typer.Option(
            min=0,
            max=10**6,
            help="Machines beyond those needed at the peak.",
            rich_help_panel=_MACHINE,
        ),
    ] = 1,
    machine_price: Annotated[
        float | None,
        typer.Option(help="USD an hour, of one machine.", rich_help_panel=_MONEY),
    ] = None,
    operations: Annotated[
        float,
        typer.Option(help="USD a month: people, storage, network.", rich_help_panel=_MONEY),
    ] = 0.0,
    api_input_price: Annotated[
        float | None,
        typer.Option(help="USD a million prompt tokens.", rich_help_panel=_MONEY),
    ] = None,
    api_output_price: Annotated[
        float | None,
        typer.Option(help="USD a million output tokens.", rich_help_panel=_MONEY),
    ] = None,
    api_adapter_price: Annotated[
        float,
        typer.Option(
            help="USD an hour that an API asks to host one adapter.", rich_help_panel=_MONEY
        ),
    ] = 0.0,
    as_json: OneJsonOption = False,
) -> None:
    """Work out memory, machines and cost for a workload, and when not to self-host.

    Sizes are the engine's own. Speed is an estimate unless you give what you
    measured: `loraplex bench` on one machine. Prices are yours: none is built
    in. The formulas are in docs/capacity.md.

    Exit code 0: there is a plan, whatever it advises; 1: nothing fits the
    machine; 2: wrong usage.

    Examples:

      loraplex plan --machine h100 --machine-price 2.5

      loraplex plan /models/llama-3-8b --tokens-per-second 4000 --tenants 800 --machine a100 --machine-price 1.8 --api-input-price 0.2 --api-output-price 0.6

      loraplex plan --machine cpu --memory-gib 24 --read-gb-s 40 --tflops 2 --measured-tokens-per-second 209 --json
    """
    from decimal import Decimal

    from loraplex_platform.cli.output import print_json
    from loraplex_platform.planning.capacity import PlanError, Workload, plan_capacity
    from loraplex_platform.planning.cost import Prices, judge, plan_cost

    _check_numbers(
        {
            "--tokens-per-second": (tokens_per_second, _ABOVE_0),
            "--mean-share": (mean_share, _SHARE),
            "--prompt-tokens": (prompt_tokens, _ABOVE_0),
            "--output-tokens": (output_tokens, _ABOVE_0),
            "--cached-share": (cached_share, _BELOW_1),
            "--adapters-per-tenant": (adapters_per_tenant, _FROM_0),
            "--memory-gib": (memory_gib, _ABOVE_0),
            "--read-gb-s": (read_gb_s, _ABOVE_0),
            "--tflops": (tflops, _ABOVE_0),
            "--measured-tokens-per-second": (measured_tokens_per_second, _ABOVE_0),
            "--efficiency": (efficiency, _SHARE),
            "--machine-price": (machine_price, _FROM_0),
            "--operations": (operations, _FROM_0),
            "--api-input-price": (api_input_price, _FROM_0),
            "--api-output-price": (api_output_price, _FROM_0),
            "--api-adapter-price": (api_adapter_price, _FROM_0),
        }
    )
    _check_money(machine_price, operations, api_input_price, api_output_price, api_adapter_price)
    registered = round(tenants * adapters_per_tenant)
    if active_adapters is None:
        active_adapters = min(registered, max(1, registered // 10))
    try:
        workload = Workload(
            output_tokens_per_s=tokens_per_second,
            mean_share=mean_share,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            cached_share=cached_share,
            adapters=active_adapters,
            registered=registered,
            ranks=_ranks(ranks),
            modules=None if modules is None else frozenset(modules.replace(" ", "").split(",")),
        )
        chosen = _machine(machine, memory_gib, read_gb_s, tflops)
        if not chosen.is_gpu and kv_cache_dtype != "auto":
            raise CommandError(
                f"--kv-cache-dtype is {kv_cache_dtype}, but on a CPU keys and values are kept in the model's dtype:"
                " leave it out, or give a --machine with a GPU"
            )
        described = _model(
            model, dtype, quantization, None if kv_cache_dtype == "auto" else kv_cache_dtype
        )
        capacity = plan_capacity(
            described,
            workload,
            chosen,
            rows=rows,
            measured_tokens_per_s=measured_tokens_per_second,
            efficiency=efficiency,
            spare=spare,
        )
    except PlanError as error:
        raise CommandError(str(error)) from None
    except ValueError as error:
        raise CommandError(f"--modules or --quantization: {error}") from None
    cost = verdict = None
    if machine_price is not None:

        def usd(value: float | None) -> Decimal | None:
            return None if value is None else Decimal(str(value))

        prices = Prices(
            machine_hour=Decimal(str(machine_price)),
            operations_month=Decimal(str(operations)),
            api_input=usd(api_input_price),
            api_output=usd(api_output_price),
            api_adapter_hour=Decimal(str(api_adapter_price)),
        )
        cost = plan_cost(capacity, workload, prices)
        verdict = judge(capacity, workload, cost)
    if as_json:
        print_json(_as_json(chosen, capacity, cost, verdict))
    else:
        _print(described, workload, chosen, capacity, cost, verdict)


# Largest number that any flag means something with: beyond it sums overflow.
_LARGEST = 1e15


@dataclass(frozen=True, slots=True)
class _Range:
    """Which numbers a flag has, and how that is told."""

    told: str
    least: float = 0.0
    most: float = _LARGEST
    has_least: bool = False
    has_most: bool = True

    def holds(self, value: float) -> bool:
        """Whether it is one of them; nan and infinity are none."""
        above = value >= self.least if self.has_least else value > self.least
        return above and (value <= self.most if self.has_most else value < self.most)


_ABOVE_0 = _Range("a number above 0 and up to 1e15")
_FROM_0 = _Range("a number from 0 to 1e15", has_least=True)
_SHARE = _Range("a share above 0 and up to 1", most=1.0)
_BELOW_1 = _Range("a share from 0 to below 1", most=1.0, has_least=True, has_most=False)


def _check_numbers(given: Mapping[str, tuple[float | None, _Range]]) -> None:
    for flag, (value, numbers) in given.items():
        if value is not None and not numbers.holds(value):
            raise CommandError(f"{flag} is {value:g}: give {numbers.told}")


def _check_money(
    machine_price: float | None,
    operations: float,
    api_input_price: float | None,
    api_output_price: float | None,
    api_adapter_price: float,
) -> None:
    """Each price is used, or refused."""
    if (api_input_price is None) != (api_output_price is None):
        raise CommandError(
            "--api-input-price and --api-output-price go together: give both or neither"
        )
    if api_adapter_price and api_input_price is None:
        raise CommandError(
            "--api-adapter-price is one part of an API's bill: give --api-input-price and --api-output-price too"
        )
    if machine_price is None:
        for flag, value in (("--operations", operations), ("--api-input-price", api_input_price)):
            if value:
                raise CommandError(f"{flag} needs --machine-price: nothing costs without it")


def _ranks(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdigit() for part in parts):
        raise CommandError(f"--ranks is {text!r}: give whole numbers, such as 8,16,64")
    return tuple(int(part) for part in parts)


def _machine(
    name: str, memory_gib: float | None, read_gb_s: float | None, tflops: float | None
) -> Machine:
    from dataclasses import replace

    from loraplex_platform.planning.capacity import GPUS, Machine

    known = GPUS.get(name.lower())
    if known is not None:
        return replace(
            known,
            memory_bytes=known.memory_bytes if memory_gib is None else int(memory_gib * 2**30),
            read_gb_s=read_gb_s or known.read_gb_s,
            tflops=tflops or known.tflops,
        )
    if name.lower() not in ("cpu", "gpu"):
        raise CommandError(f"--machine is {name!r}: give {', '.join(GPUS)}, cpu or gpu")
    if memory_gib is None or read_gb_s is None or tflops is None:
        raise CommandError(
            f"--machine {name} needs --memory-gib, --read-gb-s and --tflops: `loraplex bench profile` measures"
            " the last two"
        )
    return Machine(
        name.lower(), int(memory_gib * 2**30), read_gb_s, tflops, is_gpu=name.lower() == "gpu"
    )


def _model(name: str, dtype: str, quantization: QuantizationName, kv_dtype: str | None) -> Model:
    import json

    from loraplex_engine.artifact import ModelShape
    from loraplex_engine.artifact.sizes import BYTES_OF_DTYPE
    from loraplex_engine.errors import ModelError

    from loraplex_platform.local.base_model import cache_dir
    from loraplex_platform.planning.capacity import Model

    folder = Path(name).expanduser()
    if not folder.is_dir():
        folder = cache_dir() / "models" / name.rsplit("/", 1)[-1]
    try:
        shape = ModelShape.from_config_json(folder / "config.json")
        config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except ModelError as error:
        raise CommandError(
            f"{error} Give a folder with config.json, or loraplex models pull {name}"
        ) from None
    stored = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    return Model(
        shape,
        stored if stored in BYTES_OF_DTYPE else "float32",
        dtype,
        quantization,
        kv_dtype,
    )


def _as_json(
    machine: Machine, capacity: Capacity, cost: Cost | None, verdict: Verdict | None
) -> dict[str, Any]:
    from dataclasses import asdict
    from decimal import Decimal

    def plain(values: dict[str, Any]) -> dict[str, Any]:
        return {
            key: f"{value:.6f}" if isinstance(value, Decimal) else value
            for key, value in values.items()
        }

    found = asdict(capacity) | {"total_machines": capacity.total_machines}
    found["memory"] |= {"total": capacity.memory.total}
    return {
        "machine": asdict(machine),
        "capacity": found,
        "cost": None if cost is None else plain(asdict(cost)),
        "verdict": None if verdict is None else asdict(verdict),
    }


def _print(
    model: Model,
    workload: Workload,
    machine: Machine,
    capacity: Capacity,
    cost: Cost | None,
    verdict: Verdict | None,
) -> None:
    from loraplex_engine.artifact import parameters

    from loraplex_platform.cli.output import print_rows

    memory = capacity.memory
    source = "measured" if capacity.is_measured else "estimated: measure it with `loraplex bench`"
    rows: list[tuple[str, str]] = [
        ("MEMORY OF ONE MACHINE", f"{machine.name}, {_gib(memory.available)} for the engine"),
        (
            "  weights",
            f"{_gib(memory.weights)} ({parameters(model.shape) / 1e9:.2f} billion numbers)",
        ),
        (
            "  adapters",
            f"{_gib(memory.adapters)} ({workload.adapters} in use, {_gib(capacity.adapter_bytes)} each)",
        ),
        (
            "  KV cache",
            f"{_gib(memory.kv)} ({memory.rows} requests, {memory.kv_per_token:,} bytes a token)",
        ),
        ("  the rest", _gib(memory.workspace)),
        ("  in all", _gib(memory.total)),
        ("SPEED", f"{capacity.output_tokens_per_s:,.0f} output tokens/s a machine ({source})"),
        (
            "  a decoding step",
            f"{1000 * capacity.step_s:.1f} ms, {capacity.distinct_adapters:.0f} adapters in it{_max_loras(capacity)}",
        ),
        (
            "MACHINES",
            f"{capacity.total_machines} ({capacity.machines} for the peak, {capacity.spare} spare)",
        ),
        ("  at work", f"{100 * capacity.utilization:.0f}% over a month"),
        ("ADAPTER STORE", f"{_gib(capacity.store_bytes)} for {workload.registered}"),
    ]
    if cost is not None:
        rows += [
            (
                "A MONTH",
                f"${cost.self_hosted_usd:,.2f} for {_millions(cost.prompt_tokens)} prompt and {_millions(cost.output_tokens)} output tokens",
            ),
            (
                "  a million tokens",
                f"${cost.per_million_usd:,.4f} (output alone: ${cost.per_million_output_usd:,.4f})",
            ),
        ]
        if cost.api_usd is not None:
            rows.append(
                (
                    "  by API",
                    f"${cost.api_usd:,.2f}, ${cost.api_per_million_usd:,.4f} a million tokens",
                )
            )
        if cost.break_even_tokens_per_s is not None:
            rows.append(
                (
                    "  break-even",
                    f"{cost.break_even_tokens_per_s:,.0f} output tokens/s on the average",
                )
            )
    print_rows(rows)
    if verdict is None:
        typer.echo("\nNo price given: --machine-price says what it costs.")
        return
    words = {
        "self_host": "Self-host.",
        "use_an_api": "Do not self-host.",
        "no_comparison": "No API's prices given: --api-input-price and --api-output-price compare.",
    }
    typer.echo(f"\n{words[verdict.advice]}")
    for reason in verdict.reasons:
        typer.echo(f"- {reason}")


def _max_loras(capacity: Capacity) -> str:
    """The setting that so many distinct adapters in a step need, where it is not the default."""
    import math

    from loraplex_platform.planning.capacity import DEFAULT_MAX_LORAS

    needed = math.ceil(capacity.distinct_adapters)
    return f" (--max-loras {needed})" if needed > DEFAULT_MAX_LORAS else ""


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:,.2f} GiB"


def _millions(tokens: Any) -> str:  # noqa: ANN401 - a Decimal
    return f"{float(tokens) / 1e6:,.1f} million"
