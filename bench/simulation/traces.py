"""Arrivals: generated (Poisson or in bursts, many tenants), or read from a file of JSON lines.

    {"at_s": 0.25, "tenant": "a", "prompt_tokens": 120, "output_tokens": 30}

`weight` and `priority` may be given too. Times begin at 0; a file's lines may be in any order.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request: when, whose, and how many tokens it takes."""

    at_s: float
    tenant: str
    prompt_tokens: int
    output_tokens: int
    weight: float = 1.0
    priority: int = 0

    @property
    def max_tokens(self) -> int:
        """What the client asked for: the next power of two, since nobody knows how long an answer is."""
        return 1 << (self.output_tokens - 1).bit_length() if self.output_tokens > 1 else 1


@dataclass(frozen=True, slots=True)
class Lengths:
    """Log-normal token counts, cut off at both ends."""

    median: float
    sigma: float
    least: int
    most: int

    def draw(self, rng: random.Random) -> int:
        count = self.median * math.exp(self.sigma * rng.gauss(0.0, 1.0))
        return min(self.most, max(self.least, round(count)))


@dataclass(frozen=True, slots=True)
class TenantLoad:
    """How one tenant's requests arrive.

    `burst`: requests that come at once, on average (geometric); 1 is Poisson.
    """

    name: str
    requests_per_s: float
    prompt: Lengths
    output: Lengths
    burst: float = 1.0
    weight: float = 1.0
    priority: int = 0


def generate(loads: list[TenantLoad], *, num_arrivals: int, seed: int) -> list[Arrival]:
    """`num_arrivals` requests of all tenants together. Each tenant has random numbers of its own, so its
    arrivals are the same whatever the others do, up to the trace's end.
    """
    rate = sum(load.requests_per_s for load in loads)
    end_s = 1.2 * num_arrivals / rate + 10.0  # enough; what is beyond `num_arrivals` is cut off
    arrivals: list[Arrival] = []
    for load in loads:
        rng = random.Random(f"{seed}/{load.name}")
        at_s = rng.expovariate(load.requests_per_s / load.burst)
        while at_s < end_s:
            size = 1
            while rng.random() > 1 / load.burst:
                size += 1
            for _ in range(size):
                prompt, output = load.prompt.draw(rng), load.output.draw(rng)
                arrivals.append(
                    Arrival(at_s, load.name, prompt, output, load.weight, load.priority)
                )
            at_s += rng.expovariate(load.requests_per_s / load.burst)
    arrivals.sort(key=lambda arrival: arrival.at_s)
    return arrivals[:num_arrivals]


def read(path: Path) -> list[Arrival]:
    """A trace from a file of JSON lines."""
    arrivals = [Arrival(**json.loads(line)) for line in path.read_text().splitlines() if line]
    return sorted(arrivals, key=lambda arrival: arrival.at_s)


def write(arrivals: list[Arrival], path: Path) -> None:
    """Save a trace that `read` can read."""
    path.write_text("".join(json.dumps(asdict(arrival)) + "\n" for arrival in arrivals))
