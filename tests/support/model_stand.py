"""An engine's core over a model on disk and a store of adapters, without a server or a start-up check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from loraplex_engine.artifact import ModelShape
from loraplex_engine.attention.setup import open_attention
from loraplex_engine.config import EngineConfig
from loraplex_engine.core import EngineCore, build_core
from loraplex_engine.kv.setup import open_prefix_cache
from loraplex_engine.lora.setup import Lora, open_lora
from loraplex_engine.runner import ModelRunner, build_runner, load_model
from loraplex_engine.sampling.sampler import GumbelSurvivors
from loraplex_engine.speculative import Proposer
from loraplex_engine.structured.compiler import GrammarSource
from loraplex_kernels.cpu.scan import RowScan

EOS = 2


@dataclass(frozen=True)
class ModelStand:
    """`folder` holds `model` and `store`; `max_loras` adapters fit in a step."""

    folder: Path
    max_loras: int
    backend: Literal["native", "torch"]  # of attention and adapters
    dtype: Literal["float32", "bfloat16"]
    kernels: Path
    vocab_size: int  # ids that may be sampled
    opened: list[Lora] = field(default_factory=list)

    def core(
        self,
        *,
        proposer: Proposer | None = None,
        grammars: GrammarSource | None = None,
        survivors: GumbelSurvivors | None = None,
        prepare: Callable[[ModelRunner], None] = lambda _: None,
        **settings: Any,
    ) -> EngineCore:
        """A fresh core; `close` stops what it loads adapters with.

        Args:
            prepare: is given the runner before anything ran on it.
            settings: of `EngineConfig`.
        """
        config = EngineConfig(
            model_dir=self.folder / "model",
            base_model="tiny",
            num_threads=1,
            dtype=self.dtype,
            ops_backend=self.backend,
            linear_backend="native" if self.backend == "native" else "onednn",
            **settings,
        )
        model, sizes = load_model(config, cache=self.kernels)
        assert model.config.num_token_ids == self.vocab_size
        lora = open_lora(
            store_url=f"file://{self.folder}/store",
            shape=ModelShape.from_config_json(config.model_dir / "config.json"),
            cache_dir=self.kernels,
            max_loras=self.max_loras,
            max_cpu_loras=self.max_loras,
            backend=self.backend,
            dtype=model.dtype,
        )
        self.opened.append(lora)
        attention = open_attention(
            model.attention_shape,
            num_blocks=sizes.num_blocks,
            block_size=config.block_size,
            cache_dir=self.kernels,
            num_threads=torch.get_num_threads(),
            backend=self.backend,
        )
        runner = build_runner(
            config,
            model,
            sizes,
            attention=attention,
            lora=lora.backend,
            slots=lora.pool,
            survivors=survivors,
            scan=RowScan(self.kernels, num_threads=1) if self.backend == "native" else None,
        )
        prepare(runner)
        return build_core(
            config,
            sizes,
            runner,
            lora.pool,
            vocab_size=self.vocab_size,
            eos_token_ids=frozenset({EOS}),
            prefix_cache=open_prefix_cache(
                config,
                sizes,
                model_fingerprint="tiny",
                kv_format="test",
                vocab_size=self.vocab_size,
            ),
            proposer=proposer,
            grammars=grammars,
        )

    def close(self) -> None:
        """Stop the adapter loaders of every core."""
        for lora in self.opened:
            lora.pool.close()
