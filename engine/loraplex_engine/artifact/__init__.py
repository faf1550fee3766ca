"""Adapter artifacts: from a PEFT folder to checked, digested tensors, and the store they live in.

Beside them what names a base model, `identify_model`. Used on both sides: by the platform when a tenant uploads, by the engine at each load from disk.
numpy and msgspec only (the store adds fsspec): no torch here, no pickle anywhere. Nothing in an
adapter is trusted: no path, name or code in it is ever opened, imported or followed.

    artifact = read_adapter(folder, limits=AdapterLimits())     # ArtifactError(field, message, remedy)
    fit = check_fits(artifact, ModelShape.from_config_json(model_dir / "config.json"))
    AdapterStore("file:///var/lib/loraplex/store").put(folder, artifact.digest)
"""

from __future__ import annotations

from loraplex_engine.artifact.config import AdapterConfig, parse_adapter_config
from loraplex_engine.artifact.errors import (
    AdapterNotStoredError,
    ArtifactError,
    StoreUnavailableError,
)
from loraplex_engine.artifact.limits import AdapterLimits
from loraplex_engine.artifact.memory import (
    AdapterMemory,
    AdapterOverhead,
    ModuleMemory,
    estimate_memory,
    estimate_overhead,
)
from loraplex_engine.artifact.reader import (
    ADAPTER_FILES,
    CONFIG_FILE,
    EMBEDDING,
    HEAD,
    TENSORS_FILE,
    AdapterArtifact,
    Check,
    LoraPair,
    ModuleName,
    Norms,
    check_file_name,
    read_adapter,
)
from loraplex_engine.artifact.shape import Fit, ModelShape, check_fits
from loraplex_engine.artifact.sizes import (
    BaseMemory,
    adapter_numbers,
    base_memory,
    kv_bytes_per_token,
    parameters,
)
from loraplex_engine.artifact.store import (
    AdapterStore,
    open_remote,
    telling_unavailable,
    without_login,
)
from loraplex_engine.artifact.tensors import TensorView, read_tensors
from loraplex_engine.model_identity import (
    UNKNOWN_MODEL,
    ModelIdentity,
    identify_model,
    identity_files,
)

__all__ = [
    "ADAPTER_FILES",
    "CONFIG_FILE",
    "EMBEDDING",
    "HEAD",
    "TENSORS_FILE",
    "UNKNOWN_MODEL",
    "AdapterArtifact",
    "AdapterConfig",
    "AdapterLimits",
    "AdapterMemory",
    "AdapterNotStoredError",
    "AdapterOverhead",
    "AdapterStore",
    "ArtifactError",
    "BaseMemory",
    "Check",
    "Fit",
    "LoraPair",
    "ModelIdentity",
    "ModelShape",
    "ModuleMemory",
    "ModuleName",
    "Norms",
    "StoreUnavailableError",
    "TensorView",
    "adapter_numbers",
    "base_memory",
    "check_file_name",
    "check_fits",
    "estimate_memory",
    "estimate_overhead",
    "identify_model",
    "identity_files",
    "kv_bytes_per_token",
    "open_remote",
    "parameters",
    "parse_adapter_config",
    "read_adapter",
    "read_tensors",
    "telling_unavailable",
    "without_login",
]
