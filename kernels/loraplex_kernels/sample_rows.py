"""What the sampling kernels know of a row: one record of int64 fields, so that all rows go up in one copy.

fp64 fields are stored as their bits. Everything is computed on the host in fp64 with the rules of
loraplex_engine.sampling (temperature floor, order of filters), so that both samplers start from equal numbers.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

# Fields, by place.
TEMPERATURE = 0  # fp64; 0: greedy
TOP_K = 1  # 0: off
TOP_P = 2  # fp64; 1 or more: off
MIN_P_LOG = (
    3  # fp64, log(min_p) * temperature: how far below the highest logit; minus infinity: off
)
SEED = 4  # the bits of a uint64
POSITION = 5
NUM_FIELDS = 6


def pack_rows(
    out_RF: npt.NDArray[np.int64],
    *,
    temperature_R: npt.ArrayLike,
    top_k_R: npt.ArrayLike,
    top_p_R: npt.ArrayLike,
    min_p_R: npt.ArrayLike,
    seed_R: npt.ArrayLike,
    position_R: npt.ArrayLike,
) -> bool:
    """Write R records; returns whether any row filters (else no cutoff need be looked for).

    Args:
        out_RF: (R, NUM_FIELDS) int64, written.
        temperature_R: 0: greedy; such a row's other parameters have no effect.
        seed_R: uint64.   position_R: output position of the token to be drawn.

    Raises:
        ValueError: `out_RF` has another shape or dtype.
    """
    temperature = np.asarray(temperature_R, np.float64)
    if out_RF.shape != (temperature.size, NUM_FIELDS) or out_RF.dtype != np.int64:
        raise ValueError(
            f"out is {out_RF.shape} {out_RF.dtype}, not ({temperature.size}, {NUM_FIELDS}) int64"
        )
    top_k = np.asarray(top_k_R, np.int64)
    top_p = np.asarray(top_p_R, np.float64)
    min_p = np.asarray(min_p_R, np.float64)
    with np.errstate(divide="ignore"):  # log(0): off
        log_min_p = np.log(np.maximum(min_p, 0.0))
    out_RF[:, TEMPERATURE] = temperature.view(np.int64)
    out_RF[:, TOP_K] = top_k
    out_RF[:, TOP_P] = top_p.view(np.int64)
    # A product with a temperature of 0 would be NaN where the filter is off.
    min_p_log = np.where(
        min_p > 0.0, log_min_p * np.where(temperature > 0, temperature, 1.0), -np.inf
    )
    out_RF[:, MIN_P_LOG] = min_p_log.view(np.int64)
    out_RF[:, SEED] = np.asarray(seed_R, np.uint64).view(np.int64)
    out_RF[:, POSITION] = np.asarray(position_R, np.int64)
    filters = (temperature > 0) & ((top_k > 0) | (top_p < 1.0) | (min_p > 0.0))
    return bool(filters.any())
