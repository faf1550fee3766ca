"""Replay a workload file against an OpenAI-compatible server and report latency and throughput.

    python -m bench.load --url http://127.0.0.1:8000 --api-key KEY --workload w.jsonl --concurrency 16

Streams every request (`/v1/completions`, temperature 0, `ignore_eos`), keeps `concurrency` in flight,
and prints one JSON object: TTFT and inter-token p50/p95 (seconds), output tokens/s, errors. All servers
of `make bench` are asked by this code, so their times compare.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench import workload

_TIMEOUT_S = 3600.0  # between two tokens; a replay's own limit ends it before
NOT_FINISHED = "not finished within the limit"

OnDone = Callable[[int], None]  # requests done so far


@dataclass(frozen=True, slots=True)
class Target:
    """A server, and how it wants to be asked."""

    url: str
    api_keys: Mapping[str, str] = field(default_factory=dict)  # by tenant; "" for all others
    has_ignore_eos: bool = True
    # Per model, what is sent besides: llama.cpp chooses adapters by a field, not by the model's name.
    extra: Mapping[str, dict[str, Any]] = field(default_factory=dict)

    def headers(self, item: workload.WorkItem) -> dict[str, str]:
        """Of this request."""
        key = self.api_keys.get(item.tenant, self.api_keys.get(""))
        return {} if key is None else {"Authorization": f"Bearer {key}"}

    def body(self, item: workload.WorkItem) -> dict[str, Any]:
        """Of this request."""
        asked: dict[str, Any] = {
            "model": item.model,
            "prompt": item.prompt,
            "max_tokens": item.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.has_ignore_eos:
            asked["ignore_eos"] = True
        return asked | self.extra.get(item.model, {})


@dataclass(slots=True)
class Sample:
    """What one request saw. Times are seconds of a monotonic clock."""

    item_id: int
    started: float
    prompt_tokens: int = 0
    asked_tokens: int = 0
    token_times: list[float] = field(default_factory=list)
    completion_tokens: int = 0
    ended: float = 0.0
    error: str | None = None

    @property
    def received_tokens(self) -> int:
        """Tokens that came; of a request that was cut off at least so many.

        Only its end says how many there were: before it, frames with text are counted, and a frame may hold
        several tokens, or a token may have no text yet.
        """
        if self.error is None:
            return self.completion_tokens
        return max(self.completion_tokens, len(self.token_times))

    @property
    def is_counted(self) -> bool:
        """Whether its tokens and times count: it was answered in full, or merely cut off at the limit."""
        return self.error is None or self.error == NOT_FINISHED


def _has_token(choice: Mapping[str, Any]) -> bool:
    """Whether text came: a frame without any shows no token, whatever it says of the end."""
    return bool(choice.get("text"))


async def _one(client: httpx.AsyncClient, target: Target, item: workload.WorkItem) -> Sample:
    sample = Sample(item.id, time.perf_counter(), len(item.prompt), item.max_tokens)
    try:
        async with client.stream(
            "POST", "/v1/completions", json=target.body(item), headers=target.headers(item)
        ) as response:
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
                if any(map(_has_token, frame["choices"])):
                    sample.token_times.append(time.perf_counter())
            if not is_done:
                sample.error = "stream ended without [DONE]"
            elif sample.completion_tokens != item.max_tokens:
                sample.error = (
                    f"{sample.completion_tokens} tokens came, {item.max_tokens} were asked for"
                )
    except (httpx.HTTPError, ValueError, KeyError) as error:
        sample.error = f"{type(error).__name__}: {error}"
    except asyncio.CancelledError:
        sample.error = NOT_FINISHED
    finally:
        sample.ended = time.perf_counter()
    return sample


async def replay(
    target: Target,
    items: Sequence[workload.WorkItem],
    *,
    concurrency: int,
    limit_s: float | None = None,
    on_done: OnDone | None = None,
) -> list[Sample]:
    """Run every item, at most `concurrency` at a time, in order of the file.

    After `limit_s` seconds what runs is cut off and counts as an error; what had not begun is not begun.
    """
    limits = httpx.Limits(max_connections=concurrency + 4)
    waiting = list(reversed(items))
    samples: list[Sample] = []
    async with httpx.AsyncClient(base_url=target.url, timeout=_TIMEOUT_S, limits=limits) as client:

        async def work() -> None:
            while waiting:
                sample = await _one(client, target, waiting.pop())
                samples.append(sample)
                if sample.error == NOT_FINISHED:
                    return
                if on_done is not None:
                    on_done(len(samples))

        workers = [asyncio.create_task(work()) for _ in range(min(concurrency, len(items)))]
        _, late = await asyncio.wait(workers, timeout=limit_s)
        for task in late:
            task.cancel()
        await asyncio.gather(*workers)
    return samples


def quantile(values: Sequence[float], q: float) -> float | None:
    """The value below which a share `q` of them lies; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def summarise(samples: Sequence[Sample], num_items: int | None = None) -> dict[str, Any]:
    """Figures over all samples; the clock runs from the first start to the last end.

    Requests that failed count in `errors` and `faults` alone, those that were cut off with what came: then the
    tokens, and so the speeds, are the least that they can have been.

    Args:
        num_items: requests of the file, if it was cut off before all had begun.
    """
    good = [s for s in samples if s.error is None]
    num_items = len(samples) if num_items is None else num_items
    counted = [s for s in samples if s.is_counted]
    begins, ends = (s.started for s in samples), (s.ended for s in samples)
    wall_s = max(ends, default=0.0) - min(begins, default=0.0)
    tokens = sum(s.received_tokens for s in counted)
    # A prompt of a request that was cut off was computed if a token came.
    prompt_tokens = sum(s.prompt_tokens for s in counted if s.error is None or s.token_times)
    ttft = [s.token_times[0] - s.started for s in counted if s.token_times]
    gaps = [b - a for s in good for a, b in zip(s.token_times, s.token_times[1:], strict=False)]
    is_cut = any(s.error == NOT_FINISHED for s in samples) or len(samples) < num_items
    return {
        "requests": num_items,
        "errors": num_items - len(good),
        "faults": len(samples) - len(counted),  # of the errors, those that no limit caused
        "error_examples": sorted({s.error for s in samples if s.error})[:3],
        "is_cut": is_cut,
        "wall_s": wall_s,
        "output_tokens": tokens,
        "output_tokens_per_s": tokens / wall_s if wall_s else 0.0,
        "prompt_tokens": prompt_tokens,
        "prompt_tokens_per_s": prompt_tokens / wall_s if wall_s else 0.0,
        "ttft_p50_s": quantile(ttft, 0.5),
        "ttft_p95_s": quantile(ttft, 0.95),
        "inter_token_p50_s": quantile(gaps, 0.5),
        "inter_token_p95_s": quantile(gaps, 0.95),
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
    target = Target(args.url, {"": args.api_key}, has_ignore_eos=not args.no_ignore_eos)
    samples = asyncio.run(replay(target, items, concurrency=args.concurrency))
    text = json.dumps(summarise(samples), indent=2)
    print(text)
    if args.out:
        args.out.write_text(text)
    sys.exit(1 if any(s.error for s in samples) else 0)


if __name__ == "__main__":
    main()
