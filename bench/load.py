"""Replay a workload file against an OpenAI-compatible server and report latency and throughput.

    python -m bench.load --url http://127.0.0.1:8000 --api-key KEY --workload w.jsonl --concurrency 16

Streams every request (`/v1/completions`, temperature 0, `ignore_eos`), keeps `concurrency` in flight,
and prints one JSON object: TTFT and inter-token p50/p95 (seconds), output tokens/s, errors.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench import workload

_TIMEOUT_S = 600.0


@dataclass(slots=True)
class Sample:
    """What one request saw. Times are seconds of a monotonic clock."""

    item_id: int
    started: float
    token_times: list[float] = field(default_factory=list)
    completion_tokens: int = 0
    ended: float = 0.0
    error: str | None = None


async def _one(
    client: httpx.AsyncClient, item: workload.WorkItem, *, has_ignore_eos: bool
) -> Sample:
    sample = Sample(item.id, time.perf_counter())
    body: dict[str, Any] = {
        "model": item.model,
        "prompt": item.prompt,
        "max_tokens": item.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if has_ignore_eos:
        body["ignore_eos"] = True
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != httpx.codes.OK:
                text = (await response.aread()).decode(errors="replace")
                sample.error = f"HTTP {response.status_code}: {text[:200]}"
                return sample
            is_done = False
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    is_done = True
                    break
                frame = json.loads(line.removeprefix("data: "))
                if "error" in frame:
                    sample.error = str(frame["error"])[:200]
                    return sample
                if frame.get("usage"):
                    sample.completion_tokens = frame["usage"]["completion_tokens"]
                if frame["choices"]:
                    sample.token_times.append(time.perf_counter())
            if not is_done:
                sample.error = "stream ended without [DONE]"
    except httpx.HTTPError as error:
        sample.error = f"{type(error).__name__}: {error}"
    finally:
        sample.ended = time.perf_counter()
    return sample


async def replay(
    url: str,
    api_key: str,
    items: list[workload.WorkItem],
    *,
    concurrency: int,
    has_ignore_eos: bool = True,
) -> list[Sample]:
    """Run every item, at most `concurrency` at a time, in order of the file."""
    limits = httpx.Limits(max_connections=concurrency + 4)
    gate = asyncio.Semaphore(concurrency)
    headers = {"Authorization": f"Bearer {api_key}"}
    async with httpx.AsyncClient(
        base_url=url, headers=headers, timeout=_TIMEOUT_S, limits=limits
    ) as client:

        async def run(item: workload.WorkItem) -> Sample:
            async with gate:
                return await _one(client, item, has_ignore_eos=has_ignore_eos)

        return list(await asyncio.gather(*(run(item) for item in items)))


def _quantile(values: list[float], q: float) -> float | None:
    if not values:
        return None
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def summarise(samples: list[Sample]) -> dict[str, Any]:
    """Figures over all samples; the clock runs from the first start to the last end."""
    good = [s for s in samples if s.error is None]
    wall_s = max(s.ended for s in samples) - min(s.started for s in samples)
    tokens = sum(s.completion_tokens for s in good)
    ttft = [s.token_times[0] - s.started for s in good if s.token_times]
    gaps = [b - a for s in good for a, b in zip(s.token_times, s.token_times[1:], strict=False)]
    return {
        "requests": len(samples),
        "errors": len(samples) - len(good),
        "error_examples": sorted({s.error for s in samples if s.error})[:3],
        "wall_s": wall_s,
        "output_tokens": tokens,
        "output_tokens_per_s": tokens / wall_s,
        "ttft_p50_s": _quantile(ttft, 0.5),
        "ttft_p95_s": _quantile(ttft, 0.95),
        "inter_token_p50_s": _quantile(gaps, 0.5),
        "inter_token_p95_s": _quantile(gaps, 0.95),
        "e2e_mean_s": statistics.fmean(s.ended - s.started for s in good) if good else None,
    }


def main() -> None:
    """Command line of the load generator."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--url", required=True, help="base URL, for example http://127.0.0.1:8000")
    parser.add_argument("--api-key", required=True)
    parser.add_argument("--workload", type=Path, required=True, help="file of bench.workload")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument(
        "--no-ignore-eos", action="store_true", help="server has no ignore_eos field"
    )
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    args = parser.parse_args()
    items = workload.read(args.workload)
    samples = asyncio.run(
        replay(
            args.url,
            args.api_key,
            items,
            concurrency=args.concurrency,
            has_ignore_eos=not args.no_ignore_eos,
        )
    )
    text = json.dumps(summarise(samples), indent=2)
    print(text)
    if args.out:
        args.out.write_text(text)
    sys.exit(1 if any(s.error for s in samples) else 0)


if __name__ == "__main__":
    main()
