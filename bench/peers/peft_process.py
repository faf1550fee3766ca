"""transformers + PEFT on a workload file: one request at a time, or padded batches with `adapter_names`.

Run by `bench.peers.transformers_peft` as a process of its own. Prints lines of JSON: {"ready": true} once the
model and all adapters are loaded and warm, {"done": n} after each call, and last the figures of `load.summarise`.

There is no server and so no HTTP: latency is counted as if `--concurrency` clients each sent their next
request when their last was answered, and nothing were spent on getting it here.

    python -m bench.peers.peft_process --mode one|batch --model-dir DIR --adapters DIR --workload w.jsonl
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import load, workload
from bench.suite import BASE_MODEL

BASE_NAME = "__base__"  # PEFT's own name for "no adapter" in a mixed batch
_WARM_TOKENS = 4


def _load(model_dir: Path, folders: Sequence[Path], dtype_name: str) -> Any:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    dtype = getattr(torch, dtype_name)
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype)
    if not folders:
        return model.eval()
    first, *others = folders
    peft_model = PeftModel.from_pretrained(model, first, adapter_name=first.name)
    for folder in others:
        peft_model.load_adapter(folder, adapter_name=folder.name)
    return peft_model.to(dtype).eval()


class Generator:
    """Calls of `generate`, with the time of each of their tokens."""

    def __init__(self, model: Any, *, has_adapters: bool, is_one: bool) -> None:
        self._model = model
        self._has_adapters = has_adapters
        self._is_one = is_one

    def run(
        self, items: Sequence[workload.WorkItem], num_new: int, until: float | None = None
    ) -> list[float]:
        """One padded call; the times at which its tokens were known, `num_new` unless `until` came first."""
        import torch
        from transformers import LogitsProcessorList, StoppingCriteriaList

        longest = max(len(item.prompt) for item in items)
        ids = torch.zeros((len(items), longest), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, item in enumerate(items):
            ids[row, longest - len(item.prompt) :] = torch.tensor(item.prompt)
            mask[row, longest - len(item.prompt) :] = 1
        times: list[float] = []

        def note(_ids: Any, scores: Any) -> Any:
            times.append(time.perf_counter())
            return scores

        def is_late(seen: Any, _scores: Any, **_: Any) -> Any:
            late = until is not None and time.perf_counter() > until
            return torch.full((len(seen),), late)

        arguments: dict[str, Any] = {}
        if self._has_adapters:
            names = [BASE_NAME if i.model == BASE_MODEL else i.model for i in items]
            if self._is_one and names[0] != BASE_NAME:
                # Cheaper than a batch of names: no masks, no index per adapter.
                self._model.set_adapter(names[0])
            else:
                arguments["adapter_names"] = names
        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=num_new,
                min_new_tokens=num_new,
                do_sample=False,
                pad_token_id=0,
                logits_processor=LogitsProcessorList([note]),
                stopping_criteria=StoppingCriteriaList([is_late]),
                **arguments,
            )
        return times


def measure(
    generator: Generator,
    items: Sequence[workload.WorkItem],
    *,
    batch: int,
    concurrency: int,
    limit_s: float | None,
) -> list[load.Sample]:
    """All items in the order of the file, `batch` at a time; cut off after `limit_s` seconds."""
    started = time.perf_counter()
    until = None if limit_s is None else started + limit_s
    samples: list[load.Sample] = []
    for at in range(0, len(items), batch):
        if until is not None and time.perf_counter() > until:
            break
        group = items[at : at + batch]
        wanted = max(item.max_tokens for item in group)
        times = generator.run(group, wanted, until)
        ended = time.perf_counter()
        for position, item in enumerate(group, at):
            # A client that was answered asks again: this one's last request was `concurrency` before.
            before = position - concurrency
            sent = started if before < 0 else samples[before].ended
            sample = load.Sample(item.id, sent, len(item.prompt), item.max_tokens)
            sample.token_times = times[: item.max_tokens]
            sample.completion_tokens = len(sample.token_times)
            sample.ended = ended
            if sample.completion_tokens < item.max_tokens:
                sample.error = load.NOT_FINISHED
            samples.append(sample)
        print(json.dumps({"done": len(samples)}), flush=True)
    return samples


def main() -> None:
    """Command line of one replay."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--mode", choices=["one", "batch"], required=True)
    parser.add_argument("--model-dir", type=Path, required=True)
    parser.add_argument("--adapter", type=Path, action="append", default=[], help="a PEFT folder")
    parser.add_argument("--workload", type=Path, required=True)
    parser.add_argument("--concurrency", type=int, required=True)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--num-threads", type=int, required=True)
    parser.add_argument("--limit-s", type=float)
    args = parser.parse_args()
    import torch

    torch.set_num_threads(args.num_threads)
    items = workload.read(args.workload)
    model = _load(args.model_dir, args.adapter, args.dtype)
    generator = Generator(model, has_adapters=bool(args.adapter), is_one=args.mode == "one")
    batch = 1 if args.mode == "one" else args.concurrency
    # Warm-up: thread pools, allocator, code paths. A few short prompts touch them all.
    warm = [
        workload.WorkItem(i.id, i.model, i.prompt[:8], _WARM_TOKENS, i.tenant)
        for i in items[:batch]
    ]
    generator.run(warm, _WARM_TOKENS)
    print(json.dumps({"ready": True}), flush=True)
    samples = measure(
        generator, items, batch=batch, concurrency=args.concurrency, limit_s=args.limit_s
    )
    print(json.dumps(load.summarise(samples, len(items))), flush=True)


if __name__ == "__main__":
    main()
