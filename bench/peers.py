"""transformers + PEFT on the same prompts: one request at a time, and padded batches of 16.

Run as a process of its own for every round, so that its memory is its own and the server under
comparison is idle meanwhile. Prints one JSON object.

    python -m bench.peers --mode one|batch --model-dir DIR --adapters DIR --workload w.jsonl
"""

from __future__ import annotations

import argparse
import json
import resource
import time
import warnings
from pathlib import Path
from typing import Any

from bench import workload

BASE_NAME = "__base__"  # PEFT's own name for "no adapter" in a mixed batch
_BATCH = 16


def _load(model_dir: Path, adapters: Path, dtype_name: str) -> Any:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    dtype = getattr(torch, dtype_name)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype)
    peft_model = None
    for folder in sorted(adapters.iterdir()):
        if peft_model is None:
            peft_model = PeftModel.from_pretrained(model, folder, adapter_name=folder.name)
        else:
            peft_model.load_adapter(folder, adapter_name=folder.name)
    assert peft_model is not None
    return peft_model.to(dtype).eval()


def _generate(
    model: Any, items: list[workload.WorkItem], base_model: str, num_new: int | None = None
) -> int:
    """One padded `generate` call, of `num_new` or the items' own tokens; returns how many it made."""
    import torch

    longest = max(len(item.prompt) for item in items)
    ids = torch.zeros((len(items), longest), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, item in enumerate(items):
        ids[row, longest - len(item.prompt) :] = torch.tensor(item.prompt)
        mask[row, longest - len(item.prompt) :] = 1
    num_new = num_new or items[0].max_tokens
    names = [BASE_NAME if item.model == base_model else item.model for item in items]
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = model.generate(
            input_ids=ids,
            attention_mask=mask,
            adapter_names=names,
            max_new_tokens=num_new,
            min_new_tokens=num_new,
            do_sample=False,
            pad_token_id=0,
        )
    return int(out.shape[1] - longest) * len(items)


def main() -> None:
    """Command line of one peer round."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--mode", choices=["one", "batch"], required=True)
    parser.add_argument("--model-dir", type=Path, required=True)
    parser.add_argument("--adapters", type=Path, required=True, help="folder of PEFT folders")
    parser.add_argument("--workload", type=Path, required=True)
    parser.add_argument(
        "--base-model", default="smollm2-135m", help="model name that means no adapter"
    )
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--num-requests", type=int, help="only the first N of the workload")
    args = parser.parse_args()
    items = workload.read(args.workload)[: args.num_requests]
    model = _load(args.model_dir, args.adapters, args.dtype)
    size = 1 if args.mode == "one" else _BATCH
    # Warm-up: thread pools, allocator, code paths. A few tokens touch them all.
    _generate(model, items[:size], args.base_model, num_new=4)
    started = time.perf_counter()
    tokens = sum(
        _generate(model, items[at : at + size], args.base_model)
        for at in range(0, len(items), size)
    )
    wall_s = time.perf_counter() - started
    print(
        json.dumps(
            {
                "mode": args.mode,
                "requests": len(items),
                "output_tokens": tokens,
                "wall_s": wall_s,
                "output_tokens_per_s": tokens / wall_s,
                "peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
            }
        )
    )


if __name__ == "__main__":
    main()
