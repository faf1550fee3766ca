"""A strict reader of PEFT's adapter_config.json: what changes the result, and nothing else.

Every field falls into one of three classes: it changes the result and is honoured (rank, alpha,
their patterns, rsLoRA, which modules), it cannot change what a trained adapter computes and is
ignored (dropout, names, versions), or it asks for something not supported and is refused. A field
that is not known is refused unless it is switched off: silence would mean wrong answers.

Matching semantics are PEFT's (checked against it in tests): `target_modules` as a list matches a
module's full name or a suffix after a dot, as a string the whole name as a regular expression;
`rank_pattern` and `alpha_pattern` match the end of the name, first match in file order wins.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn, TypeVar

import msgspec

from loraplex_engine.artifact.errors import ArtifactError
from loraplex_engine.artifact.limits import AdapterLimits
from loraplex_engine.artifact.pattern import MAX_WAYS, UnsafePatternError, check_pattern

Number = TypeVar("Number", int, float)

FIELD = "adapter_config"

ALL_LINEAR = "all-linear"

# They cannot change what trained tensors compute, so they are neither read nor part of the digest.
_IGNORED_FIELDS = frozenset(
    {
        "base_model_name_or_path",  # informational; fit is decided by shapes
        "corda_config",
        "eva_config",
        "inference_mode",
        "loftq_config",
        "lora_dropout",
        "lora_ga_config",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
    }
)

_HONOURED_FIELDS = frozenset(
    {
        "alpha_pattern",
        "exclude_modules",
        "layers_pattern",
        "layers_to_transform",
        "lora_alpha",
        "peft_type",
        "r",
        "rank_pattern",
        "target_modules",
        "task_type",
        "use_rslora",
        "init_lora_weights",
        "auto_mapping",
        "bias",
        "ensure_weight_tying",
        "fan_in_fan_out",
    }
)

EMBED_TOKENS = "model.embed_tokens"
LM_HEAD = "lm_head"
# By which PEFT recognises modules whose weights may be tied.
_TIED_NAMES = ("embed_tokens", "lm_head")

_TRAIN_AGAIN = "Train a plain LoRA adapter (no {}) on the linear layers."
_OR_MERGE = (
    "or merge it with PEFT (merge_and_unload) and serve the result as a base model of its own."
)

# Features that change the result and are not served: field -> (what it is, what to do).
_REFUSED_FIELDS: dict[str, tuple[str, str]] = {
    "use_dora": (
        "DoRA rescales whole weight rows and is not served.",
        f"Train with use_dora=false, {_OR_MERGE}",
    ),
    "modules_to_save": (
        "it replaces whole modules of the base, which all tenants share.",
        "Train without modules_to_save (LoRA on embed_tokens and lm_head is served: name them in "
        f"target_modules instead), {_OR_MERGE}",
    ),
    "lora_bias": (
        "biases in LoRA layers are not served.",
        f"Train with lora_bias=false, {_OR_MERGE}",
    ),
    "trainable_token_indices": (
        "it replaces rows of the token embeddings, which all tenants share.",
        "Train without new or changed tokens, with embed_tokens in target_modules instead, "
        f"{_OR_MERGE}",
    ),
    "layer_replication": (
        "it makes a deeper model out of the base.",
        "Train on the base model as it is.",
    ),
    "target_parameters": (
        "LoRA on bare parameters is not served.",
        "Name linear layers in target_modules instead.",
    ),
    "alora_invocation_tokens": (
        "activated LoRA is not served.",
        _TRAIN_AGAIN.format("alora_invocation_tokens"),
    ),
    "use_qalora": ("QALoRA is not served.", _TRAIN_AGAIN.format("use_qalora")),
    "use_bdlora": ("block-diagonal LoRA is not served.", _TRAIN_AGAIN.format("use_bdlora")),
    "arrow_config": ("Arrow routing is not served.", _TRAIN_AGAIN.format("arrow_config")),
    "kasa_config": ("KaSA changes the base weights.", _TRAIN_AGAIN.format("kasa_config")),
    "monteclora_config": (
        "MonteCLoRA is not served.",
        _TRAIN_AGAIN.format("monteclora_config"),
    ),
    "velora_config": ("VeLoRA is not served.", _TRAIN_AGAIN.format("velora_config")),
    "megatron_config": ("Megatron layers are not served.", _TRAIN_AGAIN.format("megatron_config")),
}

# Initialisations that leave the base weights alone. Others (pissa, olora, ...) subtract something from
# them: such an adapter is right only on the base so changed, until it is converted. A name that is not
# known here may be one of those.
_PLAIN_INITS = frozenset({"gaussian", "eva", "mica", "orthogonal"})


class AdapterConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What of adapter_config.json decides the result. Patterns keep their order: first match wins.

    Fields with defaults came later: left out of the manifest while they have them, so that no digest of
    an older adapter changes.
    """

    rank: int
    alpha: float
    use_rslora: bool
    rank_pattern: tuple[tuple[str, int], ...]
    alpha_pattern: tuple[tuple[str, float], ...]
    target_modules: str | tuple[str, ...]  # a regular expression, or sorted names
    exclude_modules: str | tuple[str, ...]
    layers_to_transform: tuple[int, ...] | None  # sorted
    layers_pattern: tuple[str, ...]
    # PEFT's ensure_weight_tying where it acts: on a tied base, lm_head gets the embedding's pair too.
    is_tying: bool = False

    def targets(self, module: str) -> bool:
        """True if the adapter adapts `module`, for example "model.layers.3.self_attn.q_proj"."""
        if isinstance(self.exclude_modules, str):
            if self.exclude_modules and re.fullmatch(self.exclude_modules, module):
                return False
        elif _is_named(module, self.exclude_modules):
            return False
        if isinstance(self.target_modules, str):
            if self.target_modules.lower() == ALL_LINEAR:
                return module not in (LM_HEAD, EMBED_TOKENS)  # an embedding is no linear
            return re.fullmatch(self.target_modules, module) is not None
        if module in self.target_modules:
            return True  # a full name is meant as it stands, whatever layers are listed
        if not _is_named(module, self.target_modules):
            return False
        if not self.layers_to_transform:
            return True
        layer = self._layer_of(module)
        return layer is not None and layer in self.layers_to_transform

    def rank_of(self, module: str) -> int:
        """Rank of the pair on `module`."""
        return _first_match(self.rank_pattern, module, self.rank)

    def scale_of(self, module: str) -> float:
        """What B A x is multiplied by: alpha / r, or alpha / sqrt(r) with rsLoRA."""
        rank, alpha = self.rank_of(module), _first_match(self.alpha_pattern, module, self.alpha)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    def _layer_of(self, module: str) -> int | None:
        if not self.layers_pattern:
            match = re.match(r".*?\.[^.]*\.(?P<idx>\d+)\.", module)
        else:
            matches = (
                re.match(rf"(?:^|.*?\.){pattern}\.(?P<idx>\d+)\.", module)
                for pattern in self.layers_pattern
            )
            match = next((match for match in matches if match is not None), None)
        return None if match is None else int(match["idx"])


def _is_named(module: str, names: tuple[str, ...]) -> bool:
    return any(module == name or module.endswith(f".{name}") for name in names)


def _first_match(pattern: tuple[tuple[str, Number], ...], module: str, default: Number) -> Number:
    for key, value in pattern:
        if re.match(rf"(.*\.)?({key})$", module):
            return value
    return default


def parse_adapter_config(raw: bytes, *, limits: AdapterLimits) -> AdapterConfig:
    """Parse and check adapter_config.json.

    Raises:
        ArtifactError: not JSON, not a LoRA config, or it asks for something not supported.
    """
    fields = _Fields(_parse_json(raw, limits))
    if fields.raw.get("peft_type") != "LORA":
        fields.refuse(
            "peft_type",
            f"it is {_shown(fields.raw.get('peft_type'))}; only LORA is served.",
            "Train a LoRA adapter (peft.LoraConfig).",
        )
    _refuse_unsupported(fields)

    target_modules = fields.names_or_regex("target_modules", limits)
    if not target_modules:
        fields.refuse("target_modules", "no target modules.", "Name the adapted linear layers.")
    layers = _parse_layers(fields)
    layers_pattern = fields.names_or_regex("layers_pattern", limits, ordered=True)
    if isinstance(layers_pattern, str):
        layers_pattern = (layers_pattern,) if layers_pattern else ()
    for pattern in layers_pattern:
        fields.check_regex("layers_pattern", pattern, limits)
    has_layers = fields.raw.get("layers_to_transform") is not None
    has_layers_pattern = fields.raw.get("layers_pattern") is not None
    if isinstance(target_modules, str) and (has_layers or has_layers_pattern):
        fields.refuse(
            "layers_to_transform",
            "it has no meaning when target_modules is a regular expression.",
            "Put the layers into the expression, or list the modules by name.",
        )
    if layers_pattern and not has_layers:
        fields.refuse(
            "layers_pattern", "layers_to_transform is missing.", "Set both, or neither of them."
        )
    rank_pattern = fields.pattern("rank_pattern", limits)
    ranks = tuple((key, fields.rank("rank_pattern", value, limits)) for key, value in rank_pattern)
    alpha_pattern = fields.pattern("alpha_pattern", limits)
    alphas = tuple((key, fields.alpha("alpha_pattern", value)) for key, value in alpha_pattern)
    return AdapterConfig(
        rank=fields.rank("r", fields.raw.get("r", 8), limits),
        alpha=fields.alpha("lora_alpha", fields.raw.get("lora_alpha", 8)),
        use_rslora=fields.flag("use_rslora"),
        rank_pattern=ranks,
        alpha_pattern=alphas,
        target_modules=target_modules,
        exclude_modules=fields.names_or_regex("exclude_modules", limits),
        layers_to_transform=layers,
        layers_pattern=layers_pattern,
        is_tying=fields.flag("ensure_weight_tying") and _names_tied(target_modules),
    )


def _names_tied(target_modules: str | tuple[str, ...]) -> bool:
    """Whether PEFT sees an embedding among the targets; a regular expression must match a bare name."""
    if isinstance(target_modules, str):
        return any(re.fullmatch(target_modules, name) for name in _TIED_NAMES)
    return any(name.rsplit(".", 1)[-1] in _TIED_NAMES for name in target_modules)


def _parse_json(raw: bytes, limits: AdapterLimits) -> dict[str, Any]:
    def refuse(message: str) -> NoReturn:
        raise ArtifactError(FIELD, message, "Upload the file PEFT's save_pretrained wrote.")

    def pairs_to_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in pairs:
            if key in result:
                refuse(f"it has the key {key[:80]!r} twice.")
            result[key] = value
        return result

    def refuse_constant(text: str) -> NoReturn:
        refuse(f"it holds {text}, which is not a number in JSON.")

    if len(raw) > limits.max_config_bytes:
        refuse(f"it has {len(raw)} bytes; {limits.max_config_bytes} are allowed.")
    try:
        config = json.loads(
            raw.decode("utf-8"), object_pairs_hook=pairs_to_dict, parse_constant=refuse_constant
        )
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError, ValueError) as error:
        refuse(f"it is not valid JSON ({type(error).__name__}).")
    if not isinstance(config, dict):
        refuse("it is not a JSON object.")
    return config


def _refuse_unsupported(fields: _Fields) -> None:
    for name, value in fields.raw.items():
        if name in _REFUSED_FIELDS:
            if _is_on(value):
                fields.refuse(name, *_REFUSED_FIELDS[name])
        elif name not in _HONOURED_FIELDS and name not in _IGNORED_FIELDS and _is_on(value):
            fields.refuse(
                name[:80],
                f"this field is not known here, and {_shown(value)} may change the result.",
                "Remove it if the adapter does not need it.",
            )
    bias = fields.raw.get("bias", "none")
    if bias not in ("none", None):
        fields.refuse(
            "bias",
            f"it is {_shown(bias)}: it trains biases of the base, which all tenants share.",
            f'Train with bias="none", {_OR_MERGE}',
        )
    if fields.flag("fan_in_fan_out"):
        fields.refuse(
            "fan_in_fan_out",
            "transposed (Conv1D) layers are not part of this base model.",
            "Set it to false; PEFT does so by itself for linear layers.",
        )
    task = fields.raw.get("task_type")
    if task not in (None, "CAUSAL_LM"):
        fields.refuse(
            "task_type",
            f"it is {_shown(task)}; the base model generates text.",
            'Train with task_type="CAUSAL_LM".',
        )
    init = fields.raw.get("init_lora_weights")
    if isinstance(init, str) and init.lower() not in _PLAIN_INITS:
        fields.refuse(
            "init_lora_weights",
            f"{_shown(init)} is not known to leave the base weights as they are.",
            "Convert it to plain LoRA: save_pretrained(path_initial_model_for_weight_conversion=...).",
        )
    _check_auto_mapping(fields)


def _check_auto_mapping(fields: _Fields) -> None:
    """PEFT records the trained class here when no task was named; anything else could name code."""
    mapping = fields.raw.get("auto_mapping")
    if mapping is None:
        return
    if not (
        isinstance(mapping, dict)
        and set(mapping) == {"base_model_class", "parent_library"}
        and re.fullmatch(r"[A-Za-z0-9]+ForCausalLM", str(mapping["base_model_class"]))
        and re.fullmatch(r"transformers\.models(\.[a-z0-9_]+)+", str(mapping["parent_library"]))
    ):
        fields.refuse(
            "auto_mapping",
            "it names code; no code is ever loaded for an adapter.",
            'Set task_type="CAUSAL_LM" and remove it.',
        )


def _parse_layers(fields: _Fields) -> tuple[int, ...] | None:
    value = fields.raw.get("layers_to_transform")
    if value is None or value == []:
        return None
    layers = value if isinstance(value, list) else [value]
    if len(layers) > 100_000 or not all(
        isinstance(layer, int) and not isinstance(layer, bool) and 0 <= layer < 100_000
        for layer in layers
    ):
        fields.refuse(
            "layers_to_transform", "it must be layer numbers from 0 on.", "Mend the config."
        )
    return tuple(sorted(set(layers)))


def _is_on(value: object) -> bool:
    """False for the values by which PEFT says that a feature is not used."""
    return value is not None and value is not False and value not in ({}, [], "")


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=True, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


class _Fields:
    """Typed access to the raw config; every complaint names the field."""

    def __init__(self, raw: dict[str, Any]) -> None:
        self.raw = raw
        self._num_ways = 0  # of all patterns together: each may be tried on each module

    def refuse(self, name: str, message: str, remedy: str) -> NoReturn:
        raise ArtifactError(f"{FIELD}.{name}", message, remedy)

    def flag(self, name: str) -> bool:
        value = self.raw.get(name, False)
        if value is None:
            return False
        if not isinstance(value, bool):
            self.refuse(name, f"{_shown(value)} is not true or false.", "Mend the config.")
        return value

    def rank(self, name: str, value: object, limits: AdapterLimits) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self.refuse(name, f"{_shown(value)} is not a rank (1 or more).", "Mend the config.")
        if value > limits.max_rank:
            self.refuse(
                name,
                f"rank {_shown(value)} is beyond the cap of {limits.max_rank}.",
                "Train with a smaller r, or ask the operator to raise the cap.",
            )
        return value

    def alpha(self, name: str, value: object) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool) or abs(value) > 1e9:
            self.refuse(name, f"{_shown(value)} is not a usable number.", "Mend the config.")
        if value == 0:
            self.refuse(name, "alpha 0 switches the adapter off.", "Use the alpha of training.")
        return float(value)

    def pattern(self, name: str, limits: AdapterLimits) -> list[tuple[str, Any]]:
        value = self.raw.get(name)
        if value is None:
            return []
        if not isinstance(value, dict):
            self.refuse(name, "it must map module name patterns to numbers.", "Mend the config.")
        if len(value) > limits.max_patterns:
            self.refuse(
                name,
                f"it has {len(value)} patterns; {limits.max_patterns} are allowed.",
                "Use patterns that cover several modules.",
            )
        for key in value:
            self.check_regex(name, key, limits)
        return list(value.items())

    def names_or_regex(
        self, name: str, limits: AdapterLimits, *, ordered: bool = False
    ) -> str | tuple[str, ...]:
        value = self.raw.get(name)
        if value is None:
            return ()
        if isinstance(value, str):
            self.check_regex(name, value, limits)
            return value
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            self.refuse(name, "it must be a list of module names or one string.", "Mend it.")
        if len(value) > limits.max_patterns or any(
            not item or len(item) > limits.max_pattern_chars for item in value
        ):
            self.refuse(name, "it has too many, empty or overlong names.", "Shorten the list.")
        if not all(item.isprintable() for item in value):
            self.refuse(name, "a name has characters that cannot be printed.", "Mend the names.")
        names = dict.fromkeys(value)
        return tuple(names if ordered else sorted(names))

    def check_regex(self, name: str, pattern: str, limits: AdapterLimits) -> None:
        if len(pattern) > limits.max_pattern_chars:
            self.refuse(
                name,
                f"a pattern has {len(pattern)} characters; {limits.max_pattern_chars} are allowed.",
                "Use shorter patterns.",
            )
        if not pattern.isprintable():
            self.refuse(name, "a pattern has characters that cannot be printed.", "Mend it.")
        try:
            self._num_ways += check_pattern(pattern)
            if self._num_ways > MAX_WAYS:
                raise UnsafePatternError("with the others, it can match in too many ways")
        except UnsafePatternError as error:
            self.refuse(
                name,
                f"the pattern {_shown(pattern)} is not accepted: {error}.",
                "Use a simpler pattern, or list the modules by name.",
            )
