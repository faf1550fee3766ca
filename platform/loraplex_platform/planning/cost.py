"""What a fleet costs a month, what an API would, and which to take. Explained in docs/capacity.md.

Money is decimal dollars here: an estimate before anything is bought, no entry of the books.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from typing import Final

from loraplex_platform.planning.capacity import Capacity, Workload

_MILLION: Final = Decimal(1_000_000)
HOURS_PER_MONTH: Final = 730
# Below this, machines stand still more than they work, whatever the comparison says.
LOW_UTILIZATION: Final = 0.2


@dataclass(frozen=True, slots=True)
class Prices:
    """In USD."""

    machine_hour: Decimal
    operations_month: Decimal = Decimal(0)  # people, storage, network: whatever is not a replica
    api_input: Decimal | None = None  # a million tokens; None: no comparison
    api_output: Decimal | None = None
    api_adapter_hour: Decimal = Decimal(0)  # of hosting one adapter, where the API asks for it


@dataclass(frozen=True, slots=True)
class Cost:
    """A month of it."""

    prompt_tokens: Decimal
    output_tokens: Decimal
    machines_usd: Decimal
    self_hosted_usd: Decimal
    per_million_usd: Decimal  # prompt and output tokens alike
    per_million_output_usd: Decimal  # if output alone had to pay
    api_usd: Decimal | None
    api_per_million_usd: Decimal | None
    # Output tokens a second, on the average, from which the fleet is cheaper; None: no comparison, or never.
    break_even_tokens_per_s: float | None


def plan_cost(capacity: Capacity, workload: Workload, prices: Prices) -> Cost:
    """The bill of a month of `HOURS_PER_MONTH` hours."""
    seconds = Decimal(HOURS_PER_MONTH * 3600)
    mean = Decimal(repr(workload.output_tokens_per_s)) * Decimal(repr(workload.mean_share))
    output = mean * seconds
    ratio = Decimal(repr(workload.prompt_tokens)) / Decimal(repr(workload.output_tokens))
    prompts = output * ratio
    machines = prices.machine_hour * HOURS_PER_MONTH * capacity.total_machines
    own = machines + prices.operations_month
    api = per_million = None
    break_even = None
    if prices.api_input is not None and prices.api_output is not None:
        hosting = prices.api_adapter_hour * HOURS_PER_MONTH * workload.registered
        tokens = (prompts * prices.api_input + output * prices.api_output) / _MILLION
        api = tokens + hosting
        per_million = api / ((prompts + output) / _MILLION)
        # One output token and its prompt's, at the API; the fleet as it is costs the same at any load.
        per_output = (ratio * prices.api_input + prices.api_output) / _MILLION
        if per_output:
            break_even = max(0.0, float((own - hosting) / per_output / seconds))
    return Cost(
        prompt_tokens=prompts,
        output_tokens=output,
        machines_usd=machines,
        self_hosted_usd=own,
        per_million_usd=own / ((prompts + output) / _MILLION),
        per_million_output_usd=own / (output / _MILLION),
        api_usd=api,
        api_per_million_usd=per_million,
        break_even_tokens_per_s=break_even,
    )


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to do, and why."""

    advice: str  # self_host | use_an_api | no_comparison
    reasons: tuple[str, ...]


def judge(capacity: Capacity, workload: Workload, cost: Cost) -> Verdict:
    """When not to self-host; each reason is a sentence with its numbers."""
    reasons = []
    mean = workload.output_tokens_per_s * workload.mean_share
    full = capacity.machines * capacity.output_tokens_per_s
    advice = "no_comparison"
    if cost.api_usd is not None:
        advice = "self_host" if cost.self_hosted_usd <= cost.api_usd else "use_an_api"
        cheaper, dearer = sorted((cost.self_hosted_usd, cost.api_usd))
        which = "the fleet" if advice == "self_host" else "the API"
        reasons.append(f"{which} is cheaper: ${cheaper:,.0f} a month against ${dearer:,.0f}")
    if cost.break_even_tokens_per_s is not None and advice == "use_an_api":
        if cost.break_even_tokens_per_s <= full:
            reasons.append(
                f"these machines pay from {cost.break_even_tokens_per_s:,.0f} output tokens/s on the average;"
                f" you have {mean:,.0f}"
            )
        else:
            reasons.append(
                f"even full ({full:,.0f} output tokens/s) these machines cost more than the API: it would take"
                f" {cost.break_even_tokens_per_s:,.0f}"
            )
    if capacity.utilization < LOW_UTILIZATION:
        reasons.append(
            f"the machines would work {100 * capacity.utilization:.0f}% of the time: share them, batch work into"
            " idle hours, or take smaller ones"
        )
    if capacity.spare == 0:
        reasons.append("without a spare machine every upgrade and every fault is an outage")
    if workload.adapters <= 1:
        reasons.append(
            "with one adapter at most there is nothing to share: merge it (loraplex adapters merge) and serve"
            " it with any engine"
        )
    return Verdict(advice, tuple(reasons))
