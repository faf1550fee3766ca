"""`make bench`: Loraplex against transformers + PEFT, alternating in one run, as one table.

Starts `loraplex up` on a data directory of its own, uploads 16 adapters of mixed rank, and replays one
workload (64 requests, 16 to 256 prompt tokens, 64 output tokens, 16 adapters and the base, 16 in
flight). Each round runs Loraplex, then each peer, so that all see the same drift of the machine; the
table shows medians over rounds and ratios round by round. The server idles while a peer runs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from bench import adapters, load, workload

_START_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 60.0
_TABLE_WIDTH = 120  # in a file; a terminal knows its own
_PEERS = {
    "one": "transformers + PEFT, one at a time",
    "batch": "transformers + PEFT, padded batches of 16",
}


def _wait_for(path: Path, process: subprocess.Popen[bytes]) -> dict[str, Any]:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"`loraplex up` ended with {process.returncode}; see its output above")
        if path.exists():
            demo: dict[str, Any] = json.loads(path.read_text())
            if demo.get("pid") == process.pid:
                return demo
        time.sleep(0.2)
    raise SystemExit(f"`loraplex up` was not ready within {_START_TIMEOUT_S:.0f} s")


@contextlib.contextmanager
def _running(data_dir: Path, model_dir: Path, extra: list[str]) -> Iterator[dict[str, Any]]:
    """A product of our own on free ports; yields demo.json's content."""
    command = [sys.executable, "-m", "loraplex_platform.cli", "up", "--demo", "--no-console"]
    command += ["--data-dir", str(data_dir), "--model", str(model_dir)]
    command += ["--gateway-port", "0", "--control-port", "0", *extra]
    log = (data_dir.parent / "up.log").open("wb")
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield _wait_for(data_dir / "demo.json", process)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(_STOP_TIMEOUT_S)
        log.close()


def _deploy(demo: dict[str, Any], folders: list[Path]) -> None:
    """Upload every folder to the first demo tenant and deploy it under its own name."""
    tenant = demo["tenants"][0]["id"]
    headers = {"Authorization": f"Bearer {demo['admin_key']}"}
    base = f"{demo['control_url']}/admin/v1/tenants/{tenant}"
    with httpx.Client(headers=headers, timeout=120.0) as client:
        for folder in folders:
            with (
                (folder / "adapter_config.json").open("rb") as config,
                (folder / "adapter_model.safetensors").open("rb") as tensors,
            ):
                reply = client.post(
                    f"{base}/adapters",
                    data={"name": folder.name},
                    files={"adapter_config": config, "adapter_model": tensors},
                )
            reply.raise_for_status()
            version_id = reply.json()["version"]["id"]
            client.put(
                f"{base}/deployments/{folder.name}", json={"version_id": version_id}
            ).raise_for_status()


def _peak_rss_gib(demo: dict[str, Any]) -> float | None:
    """Peak resident memory of the engine, from the kernel's high-water mark."""
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            command = entry.read_bytes().split(b"\0")
            if b"loraplex_engine.server" not in command:
                continue
            if _has_ancestor(entry.parent, demo["pid"]):
                status = (entry.parent / "status").read_text()
                return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) / 2**20  # type: ignore[index]
    return None


def _has_ancestor(proc: Path, pid: int) -> bool:
    current = int(proc.name)
    while current > 1:
        if current == pid:
            return True
        fields = (Path("/proc") / str(current) / "stat").read_text().rsplit(")", 1)[1].split()
        current = int(fields[1])
    return False


def _peer(mode: str, args: argparse.Namespace, scratch: Path, dtype: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.peers", "--mode", mode, "--dtype", dtype]
    command += ["--model-dir", str(args.model), "--adapters", str(scratch / "adapters")]
    command += ["--workload", str(scratch / "workload.jsonl")]
    command += ["--num-requests", str(args.one_requests if mode == "one" else args.batch_requests)]
    done = subprocess.run(command, check=True, capture_output=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def _has_fast_bf16() -> bool:
    """True where the CPU multiplies bf16 natively: peers then run bf16, as we do."""
    import torch

    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _median(rounds: list[dict[str, Any]], key: str) -> float | None:
    values = [r[key] for r in rounds if r.get(key) is not None]
    return statistics.median(values) if values else None


def _table(ours: list[dict[str, Any]], peers: dict[str, list[dict[str, Any]]]) -> Table:
    table = Table(
        title="64 requests, 16-256 prompt + 64 output tokens, 16 adapters + base, 16 in flight"
    )
    for column in (
        "server",
        "output tok/s",
        "ratio to ours",
        "TTFT p50 / p95 s",
        "ITL p50 / p95 ms",
        "peak RSS GiB",
    ):
        table.add_column(column)

    def cell(value: float | None, scale: float = 1.0, digits: int = 2) -> str:
        return "-" if value is None else f"{value * scale:.{digits}f}"

    table.add_row(
        "loraplex (over HTTP, streaming)",
        cell(_median(ours, "output_tokens_per_s"), digits=1),
        "1.00",
        f"{cell(_median(ours, 'ttft_p50_s'))} / {cell(_median(ours, 'ttft_p95_s'))}",
        f"{cell(_median(ours, 'inter_token_p50_s'), 1e3, 0)} / {cell(_median(ours, 'inter_token_p95_s'), 1e3, 0)}",
        cell(_median(ours, "peak_rss_gib")),
    )
    for mode, rounds in peers.items():
        ratios = [
            o["output_tokens_per_s"] / p["output_tokens_per_s"]
            for o, p in zip(ours, rounds, strict=True)
        ]
        table.add_row(
            _PEERS[mode],
            cell(_median(rounds, "output_tokens_per_s"), digits=1),
            f"ours is {statistics.median(ratios):.2f}x",
            "-",
            "-",
            cell(_median(rounds, "peak_rss_gib")),
        )
    return table


def main() -> None:
    """Command line of `make bench`."""
    default_model = Path(os.environ.get("LORAPLEX_CACHE_DIR", "~/.cache/loraplex")).expanduser()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=default_model / "models" / "smollm2-135m")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--num-requests", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument(
        "--one-requests", type=int, default=12, help="requests of the one-at-a-time peer"
    )
    parser.add_argument(
        "--batch-requests", type=int, default=32, help="requests of the padded-batch peer"
    )
    parser.add_argument("--no-peers", action="store_true", help="measure Loraplex alone")
    parser.add_argument("--out", type=Path, default=Path("bench/results/latest.json"))
    args = parser.parse_args()
    console = Console() if sys.stdout.isatty() else Console(width=_TABLE_WIDTH)
    dtype = "bfloat16" if _has_fast_bf16() else "float32"
    with tempfile.TemporaryDirectory(prefix="lpx-bench-") as folder:
        scratch = Path(folder)
        names = [f"bench-{idx:02d}" for idx in range(16)]
        folders = [
            adapters.write(
                scratch / "adapters" / name,
                args.model,
                rank=adapters.RANKS[idx % len(adapters.RANKS)],
                seed=idx,
                base_name="smollm2-135m",
            )
            for idx, name in enumerate(names)
        ]
        items = workload.make(
            args.model / "tokenizer.json",
            [*names, "smollm2-135m"],
            num_requests=args.num_requests,
            min_prompt_tokens=16,
            max_prompt_tokens=256,
            max_tokens=64,
            seed=0,
        )
        workload.write(items, scratch / "workload.jsonl")
        ours: list[dict[str, Any]] = []
        peers: dict[str, list[dict[str, Any]]] = {} if args.no_peers else {m: [] for m in _PEERS}
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=console) as progress:
            task = progress.add_task("starting loraplex")
            with _running(scratch / "data", args.model, []) as demo:
                progress.update(task, description="uploading 16 adapters")
                _deploy(demo, folders)
                key = demo["tenants"][0]["api_key"]
                for number in range(args.rounds):
                    progress.update(task, description=f"round {number + 1}: loraplex")
                    samples = asyncio.run(
                        load.replay(demo["gateway_url"], key, items, concurrency=args.concurrency)
                    )
                    ours.append(load.summarise(samples) | {"peak_rss_gib": _peak_rss_gib(demo)})
                    for mode, rounds in peers.items():
                        progress.update(task, description=f"round {number + 1}: {_PEERS[mode]}")
                        rounds.append(_peer(mode, args, scratch, dtype))
    console.print(_table(ours, peers))
    console.print(
        f"peers in {dtype}; medians of {args.rounds} rounds; errors: {[r['errors'] for r in ours]}"
    )
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(
        json.dumps({"loraplex": ours, "peers": peers, "peer_dtype": dtype}, indent=2)
    )
    sys.exit(1 if any(r["errors"] for r in ours) else 0)


if __name__ == "__main__":
    main()
