/* Register tiles of up to three rows: the inner loops that attention.c and lora.c share.
 *
 * A tile computes what its rows would get alone, bit for bit: each (row, column) has accumulators and an
 * order of additions of its own, whatever shares the tile. Three rows by four columns are twelve
 * accumulators; with what they are fed from, they fill sixteen vector registers and hide the latency of
 * two FMA units. All sizes are compile-time constants where these are called.
 */
#ifndef LORAPLEX_TILES_H
#define LORAPLEX_TILES_H

#include <stddef.h>

#include "simd.h"
#include "v16.h"

#define TILE_ROWS 3
#define TILE_COLS 4

INLINE v8 tile_load(const void *from, size_t index, int is_bf16) {
    return is_bf16 ? v8_load_bf16((const uint16_t *)from + index)
                   : v8_load((const float *)from + index);
}

INLINE float tile_load_one(const void *from, size_t index, int is_bf16) {
    return is_bf16 ? widen_bf16(((const uint16_t *)from)[index]) : ((const float *)from)[index];
}

#if HAS_V16
/* Eight of one row, then eight of another. */
INLINE v16 tile_load_pair(const void *low, const void *high, size_t index, int is_bf16) {
    if (!is_bf16) return v16_pair(v8_load((const float *)low + index), v8_load((const float *)high + index));
    const __m128i a = _mm_loadu_si128((const __m128i *)((const uint16_t *)low + index));
    const __m128i b = _mm_loadu_si128((const __m128i *)((const uint16_t *)high + index));
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_inserti128_si256(_mm256_castsi128_si256(a), b, 1));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
#endif

/* dot[i * dot_stride + j] = <x[i], w[j]>, over k mod 8 in order of k, then in one tree, then the last
 * num_inputs mod 8 products one by one. x is fp32, w fp32 or bf16. */
INLINE void tile_dots(const float *const *x, const void *const *w, int is_bf16, size_t num_inputs,
                      int rows, int cols, float *dot, size_t dot_stride) {
    v8 part[TILE_ROWS][2 * TILE_COLS];
    size_t k = 0;
#if HAS_V16
    /* Two columns to a vector. */
    v16 pair[TILE_ROWS][TILE_COLS];
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < cols / 2; j++) pair[i][j] = v16_zero();
    for (; k + 8 <= num_inputs; k += 8) {
        v16 x_k[TILE_ROWS];
        for (int i = 0; i < rows; i++) x_k[i] = v16_hold(_mm512_broadcast_f32x8(v8_load(x[i] + k)));
        for (int j = 0; j < cols / 2; j++) {
            const v16 w_k = v16_hold(tile_load_pair(w[2 * j], w[2 * j + 1], k, is_bf16));
            for (int i = 0; i < rows; i++) pair[i][j] = v16_fma(x_k[i], w_k, pair[i][j]);
        }
    }
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < cols; j++)
            part[i][j] = j & 1 ? v16_high(pair[i][j / 2]) : v16_low(pair[i][j / 2]);
#else
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < cols; j++) part[i][j] = v8_zero();
    for (; k + 8 <= num_inputs; k += 8) {
        v8 x_k[TILE_ROWS];
        for (int i = 0; i < rows; i++) x_k[i] = v8_hold(v8_load(x[i] + k));
        for (int j = 0; j < cols; j++) {
            const v8 w_k = v8_hold(tile_load(w[j], k, is_bf16));
            for (int i = 0; i < rows; i++) part[i][j] = v8_fma(x_k[i], w_k, part[i][j]);
        }
    }
#endif
    /* Unrolled, or the sums would go through memory. */
#pragma GCC unroll 3
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 2
        for (int j = 0; j < cols; j += 4)
            v8_store_four(dot + (size_t)i * dot_stride + j,
                          v8_sum_four(part[i][j], part[i][j + 1], part[i][j + 2], part[i][j + 3]));
    for (; k < num_inputs; k++)
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < cols; j++) {
                float *to = dot + (size_t)i * dot_stride + j;
                *to = fmaf(x[i][k], tile_load_one(w[j], k, is_bf16), *to);
            }
}

/* One row takes eight columns at once where it can: it has but one accumulator for each. */
#define TILE_DOTS(rows, suffix, is_bf16)                                                            \
    APART void tile_dots_##rows##suffix(const float *const *x, const void *const *w, size_t cols,    \
                                        size_t num_inputs, float *dot, size_t dot_stride) {          \
        const float *row[rows];                                                                      \
        for (int i = 0; i < rows; i++) row[i] = x[i];                                                \
        size_t j = 0;                                                                                \
        for (; rows == 1 && j + 2 * TILE_COLS <= cols; j += 2 * TILE_COLS)                           \
            tile_dots(row, w + j, is_bf16, num_inputs, rows, 2 * TILE_COLS, dot + j, dot_stride);    \
        for (; j < cols; j += TILE_COLS)                                                             \
            tile_dots(row, w + j, is_bf16, num_inputs, rows, TILE_COLS, dot + j, dot_stride);        \
    }
TILE_DOTS(1, fp32, 0)
TILE_DOTS(2, fp32, 0)
TILE_DOTS(3, fp32, 0)
TILE_DOTS(1, bf16, 1)
TILE_DOTS(2, bf16, 1)
TILE_DOTS(3, bf16, 1)
#undef TILE_DOTS

/* How many of `left` rows the next tile takes: three, but two and two of four. */
INLINE int tile_take(int left) { return left >= 5 || left == 3 ? 3 : left >= 2 ? 2 : 1; }

/* dot[i * dot_stride + j] = <x[i], w[j]> for 1 .. TILE_ROWS rows and a multiple of four columns; see tile_dots
 * for the order of additions. */
INLINE void tile_some_dots(const float *const *x, int rows, const void *const *w, int is_bf16,
                           size_t cols, size_t num_inputs, float *dot, size_t dot_stride) {
    typedef void dots(const float *const *, const void *const *, size_t, size_t, float *, size_t);
    static dots *const by[2][TILE_ROWS] = {
        {tile_dots_1fp32, tile_dots_2fp32, tile_dots_3fp32},
        {tile_dots_1bf16, tile_dots_2bf16, tile_dots_3bf16},
    };
    by[is_bf16][rows - 1](x, w, cols, num_inputs, dot, dot_stride);
}

/* sum[i][v] += weight[i * weight_stride] * from[8 v ..], for `width` vectors of one row of values. */
INLINE void tile_weigh(v8 (*sum)[TILE_COLS], const float *weight, size_t weight_stride,
                       const void *from, int is_bf16, int rows, int width) {
    v8 scale[TILE_ROWS];
    for (int i = 0; i < rows; i++) scale[i] = v8_all(weight[(size_t)i * weight_stride]);
    for (int v = 0; v < width; v++) {
        const v8 value = v8_hold(tile_load(from, (size_t)v * 8, is_bf16));
        for (int i = 0; i < rows; i++) sum[i][v] = v8_fma(scale[i], value, sum[i][v]);
    }
}

#endif
