/* How linear.c stores weights: panels of PANEL outputs, each read from front to back.
 *
 * A panel is PANEL columns of W^T: for every k the weights of its outputs, side by side, two vectors of them. In
 * the narrow formats a word of 32 bits holds what the same lane of several vectors needs, so that a shift brings
 * each to its place:
 *
 *   fp32  two vectors a k
 *   bf16  one vector a k: the low half of a word is output i, the high half output i + LANES
 *   int8  a fp32 scale for each output; then a byte for each output a k
 *   int4  per GROUP of k a bf16 scale and a bf16 offset for each output, as in bf16; then a vector for four k,
 *         nibbles in the same order
 *
 * An output beyond the last and a k beyond the last hold zeros; sums never read the latter.
 * A weight's value: int8 q * scale, rounded to fp32; int4 q * scale + offset, rounded once to fp32.
 */
#ifndef LORAPLEX_PANELS_H
#define LORAPLEX_PANELS_H

#include "lanes.h"

#define PANEL (2 * LANES)
#define PANEL_GROUP 32

enum { PANEL_FP32, PANEL_BF16, PANEL_INT8, PANEL_INT4, PANEL_FORMATS };

/* k that share their words. */
INLINE int panel_chunk(int format) {
    return format == PANEL_INT4 ? 4 : 1;
}

/* k whose scales are the same. */
INLINE int64_t panel_group(int format) {
    return format == PANEL_INT4 ? PANEL_GROUP : INT64_MAX;
}

#define PANEL_INT4_GROUP_BYTES (PANEL * 4 + PANEL_GROUP * PANEL / 2)

INLINE size_t panel_bytes(int format, int64_t num_inputs) {
    const size_t k = (size_t)num_inputs;
    if (format == PANEL_FP32) return k * PANEL * 4;
    if (format == PANEL_BF16) return k * PANEL * 2;
    if (format == PANEL_INT8) return PANEL * (4 + k);
    return (k + PANEL_GROUP - 1) / PANEL_GROUP * PANEL_INT4_GROUP_BYTES;
}

/* Bytes of a chunk's weights. */
INLINE int panel_chunk_bytes(int format) {
    return format == PANEL_FP32 ? PANEL * 4 : format == PANEL_INT8 ? PANEL : PANEL * 2;
}

/* Where the bits of k begin, k the first of a chunk. */
INLINE const char *panel_bits(int format, const char *panel, int64_t at) {
    const size_t k = (size_t)at;
    if (format == PANEL_FP32) return panel + k * PANEL * 4;
    if (format == PANEL_BF16) return panel + k * PANEL * 2;
    if (format == PANEL_INT8) return panel + PANEL * 4 + k * PANEL;
    return panel + k / PANEL_GROUP * PANEL_INT4_GROUP_BYTES + PANEL * 4 +
           k % PANEL_GROUP * PANEL / 2;
}

typedef struct { lanes_f scale[2], offset[2]; } panel_scales;

/* The two vectors of a line of bf16. */
INLINE void panel_widen(const char *line, lanes_f value[2]) {
    const lanes_u bits = lanes_load_bits(line);
    value[0] = lanes_of_bits(bits << 16);
    value[1] = lanes_of_bits(bits & 0xffff0000u);
}

/* The scales of k, k the first of a group. */
INLINE void panel_read_scales(int format, const char *panel, int64_t k, panel_scales *of) {
    if (format == PANEL_INT8) {
        of->scale[0] = lanes_load((const float *)panel);
        of->scale[1] = lanes_load((const float *)panel + LANES);
    } else if (format == PANEL_INT4) {
        const char *group = panel + (size_t)k / PANEL_GROUP * PANEL_INT4_GROUP_BYTES;
        panel_widen(group, of->scale);
        panel_widen(group + PANEL * 2, of->offset);
    }
}

/* The weights of the k that is `place` into the chunk of `bits`. */
INLINE void panel_weights(int format, const char *bits, int place, const panel_scales *of,
                          lanes_f weight[2]) {
    if (format == PANEL_FP32) {
        weight[0] = lanes_load((const float *)bits);
        weight[1] = lanes_load((const float *)bits + LANES);
    } else if (format == PANEL_BF16) {
        panel_widen(bits, weight);
    } else if (format == PANEL_INT8) {
        for (int half = 0; half < 2; half++) {
            const lanes_i q = lanes_load_int8(bits + half * LANES);
            weight[half] = __builtin_convertvector(q, lanes_f) * of->scale[half];
        }
    } else {
        const lanes_u words = lanes_load_bits(bits);
        for (int half = 0; half < 2; half++) {
            const lanes_i q = (lanes_i)((words >> (4 * (2 * place + half))) & 15u);
            weight[half] = lanes_fma(__builtin_convertvector(q, lanes_f), of->scale[half],
                                     of->offset[half]);
        }
    }
}

#endif
