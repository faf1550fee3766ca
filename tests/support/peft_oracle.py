"""transformers + PEFT as the oracle: adapters it saves, and the greedy tokens it gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from loraplex_engine.artifact import TENSORS_FILE
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class Continuation:
    """Greedy tokens and the log-probability of each."""

    token_ids: list[int]
    logprobs: list[float]


def save_random_adapter(
    base: PreTrainedModel,
    folder: Path,
    *,
    seed: int,
    size: float,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Path:
    """Let PEFT make, fill and save an adapter, so that its reading of the config is the oracle's."""
    torch.manual_seed(seed)
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **config))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, size)
    # Else a copy of the base's embeddings is added where they are adapted.
    model.save_pretrained(folder, save_embedding_layers=False)
    model.unload()
    (folder / "README.md").unlink(missing_ok=True)
    path = folder / TENSORS_FILE
    tensors = {name: tensor.to(dtype).contiguous() for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


class PeftOracle:
    """One base with any number of adapters, one request at a time."""

    def __init__(self, base: PreTrainedModel, adapters: dict[str, Path]) -> None:
        names = list(adapters)
        self._model = PeftModel.from_pretrained(base, adapters[names[0]], adapter_name=names[0])
        for name in names[1:]:
            self._model.load_adapter(adapters[name], adapter_name=name)
        self._model.eval()

    def greedy(self, prompt: Sequence[int], adapter: str | None, num_tokens: int) -> Continuation:
        """`num_tokens` greedy tokens after `prompt`, end-of-sequence ignored."""
        if adapter is None:
            with self._model.disable_adapter():
                return self._greedy(prompt, num_tokens)
        self._model.set_adapter(adapter)
        return self._greedy(prompt, num_tokens)

    @torch.inference_mode()
    def score(
        self, prompt: Sequence[int], adapter: str | None, token_ids: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities of given tokens after `prompt`, and the best ones at their places."""
        if adapter is None:
            with self._model.disable_adapter():
                return self._score(prompt, token_ids)
        self._model.set_adapter(adapter)
        return self._score(prompt, token_ids)

    def _score(
        self, prompt: Sequence[int], token_ids: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = torch.tensor([[*prompt, *token_ids[:-1]]])
        logits = self._model(input_ids=inputs).logits[0, len(prompt) - 1 :]
        distributions = logits.float().log_softmax(-1)
        chosen = distributions.gather(1, torch.tensor(token_ids)[:, None])[:, 0]
        return chosen, distributions.amax(-1)

    @torch.inference_mode()
    def _greedy(self, prompt: Sequence[int], num_tokens: int) -> Continuation:
        token_ids: list[int] = []
        logprobs: list[float] = []
        inputs, cache = torch.tensor([list(prompt)]), None
        for _ in range(num_tokens):
            output = self._model(input_ids=inputs, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            distribution = output.logits[0, -1].float().log_softmax(-1)
            token = int(distribution.argmax())
            token_ids.append(token)
            logprobs.append(float(distribution[token]))
            inputs = torch.tensor([[token]])
        return Continuation(token_ids, logprobs)
