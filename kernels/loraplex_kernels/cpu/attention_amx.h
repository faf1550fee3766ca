/* What attention.c does of a tile of 64 keys in tiles in hardware: scores, weights and weighted values of up to
 * 16 rows, bf16 caches. See attention.c for the rules; here is the arithmetic.
 *
 * Scores: query rows (as they are, bf16) times packed keys, fp32 sums over pairs of dims in order. Scale, maximum,
 * exponential: fp32, sixteen lanes. Weights are rounded to bf16, and so is what they are divided by: the sum of
 * the rounded ones. A result is then a mean of the values with weights that are each off by at most u = 2^-8 (half
 * of bf16's spacing, relative) and by the exponential's error, so off by at most u / (1 - u) times the mean
 * distance of the values from their mean, beside what fp32 sums lose. Values: rounded weights times packed values,
 * fp32 sums over pairs of keys in order.
 *
 * A key that a row does not see has weight zero, which adds nothing to a sum as long as the key's value is finite:
 * whoever has rows of different spans in one product asks `attention_pack_values` for that first.
 */
#ifndef LORAPLEX_ATTENTION_AMX_H
#define LORAPLEX_ATTENTION_AMX_H

#include "amx.h"

#if HAS_AMX && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512BF16__)
#define ATTENTION_HAS_AMX 1

#define PACK_KEYS 64                        /* of an attention tile */
#define PACK_GROUPS (PACK_KEYS / AMX_ROWS)  /* of keys: columns of a tile of scores */
#define PACK_STEPS (PACK_KEYS / AMX_K)      /* of keys: what weights and values are multiplied by */
#define PACK_TILE (AMX_ROWS * AMX_K)        /* bf16 of a tile */

/* Dims, rounded up to what a row of A holds: the width of packed keys and values, and of sums. */
INLINE size_t pack_width(int head_dim) { return ((size_t)head_dim + AMX_K - 1) / AMX_K * AMX_K; }

/* Of the 32 bf16 from dim d on, those that there are, in pairs. */
INLINE __mmask16 pack_pairs(size_t d, size_t head_dim) {
    return head_dim - d >= AMX_K ? 0xffff : (__mmask16)((1u << (head_dim - d) / 2) - 1);
}

/* Four columns of 16 rows of 32 bits become four rows, `stride` of them apart. */
INLINE void attention_transpose(const void *const *row, size_t byte, uint32_t *to, size_t stride) {
    /* Lane l of part[i]: of row 4 l + i. */
    __m512i part[4];
    for (int i = 0; i < 4; i++) {
#define COLUMNS_OF(r) _mm_loadu_si128((const __m128i *)((const char *)row[r] + byte))
        part[i] = _mm512_castsi128_si512(COLUMNS_OF(i));
        part[i] = _mm512_inserti32x4(part[i], COLUMNS_OF(i + 4), 1);
        part[i] = _mm512_inserti32x4(part[i], COLUMNS_OF(i + 8), 2);
        part[i] = _mm512_inserti32x4(part[i], COLUMNS_OF(i + 12), 3);
#undef COLUMNS_OF
    }
    const __m512i low01 = _mm512_unpacklo_epi32(part[0], part[1]);
    const __m512i low23 = _mm512_unpacklo_epi32(part[2], part[3]);
    const __m512i high01 = _mm512_unpackhi_epi32(part[0], part[1]);
    const __m512i high23 = _mm512_unpackhi_epi32(part[2], part[3]);
    _mm512_store_si512(to, _mm512_unpacklo_epi64(low01, low23));
    _mm512_store_si512(to + stride, _mm512_unpackhi_epi64(low01, low23));
    _mm512_store_si512(to + 2 * stride, _mm512_unpacklo_epi64(high01, high23));
    _mm512_store_si512(to + 3 * stride, _mm512_unpackhi_epi64(high01, high23));
}

/* to: (16 pairs of dims, 16 keys or queries), of 16 rows' dims from d on; beyond head_dim zeros. */
INLINE void attention_pack_group(const uint16_t *const *row, size_t d, size_t head_dim, uint16_t *to) {
    for (size_t at = d; at < d + AMX_K; at += 8, to += 4 * AMX_K) {
        if (at < head_dim)
            attention_transpose((const void *const *)row, at * sizeof(uint16_t), (uint32_t *)to, AMX_ROWS);
        else
            memset(to, 0, 4 * AMX_ROW_BYTES);
    }
}

/* to: (dims / 32, PACK_GROUPS, 16 pairs of dims, 16 keys), groups [first, end) of them. key: (PACK_KEYS). */
INLINE void attention_pack_keys(const uint16_t *const *key, int first, int end, size_t head_dim,
                                uint16_t *to) {
    for (int group = first; group < end; group++)
        for (size_t d = 0; d < head_dim; d += AMX_K)
            attention_pack_group(key + group * AMX_ROWS, d, head_dim,
                                 to + (d / AMX_K * PACK_GROUPS + (size_t)group) * PACK_TILE);
}

/* to: (PACK_STEPS, dims / 16, 16 pairs of keys, 16 dims), steps [first, end) of them; of 32 dims the first tile has
 * dims 0-3, 8-11, 16-19 and 24-27: see attention_dims_in_order. Whether all are finite. */
INLINE int attention_pack_values(const uint16_t *const *value, int first, int end, size_t head_dim,
                                 uint16_t *to) {
    const size_t columns = pack_width(head_dim) / AMX_ROWS;
    const __m512i exponent = _mm512_set1_epi16(0x7f80);
    __mmask32 is_special = 0;
    for (int pair = first * AMX_ROWS; pair < end * AMX_ROWS; pair++) {
        const uint16_t *even = value[2 * pair], *odd = value[2 * pair + 1];
        uint16_t *row = to + (size_t)(pair / AMX_ROWS) * columns * PACK_TILE +
                        (size_t)(pair % AMX_ROWS) * AMX_K;
        for (size_t d = 0; d < head_dim; d += AMX_K, row += 2 * PACK_TILE) {
            const __mmask16 pairs = pack_pairs(d, head_dim);
            const __m512i a = _mm512_maskz_loadu_epi32(pairs, even + d);
            const __m512i b = _mm512_maskz_loadu_epi32(pairs, odd + d);
            is_special |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(a, exponent), exponent);
            is_special |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(b, exponent), exponent);
            _mm512_store_si512((__m512i *)row, _mm512_unpacklo_epi16(a, b));
            _mm512_store_si512((__m512i *)(row + PACK_TILE), _mm512_unpackhi_epi16(a, b));
        }
    }
    return !is_special;
}

/* 32 sums of packed values as 32 dims. */
INLINE void attention_dims_in_order(__m512 packed[2]) {
    const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i high = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    const __m512 first = packed[0];
    packed[0] = _mm512_permutex2var_ps(first, low, packed[1]);
    packed[1] = _mm512_permutex2var_ps(first, high, packed[1]);
}

/* score (16, PACK_KEYS): products of a tile's rows of query (16, width) and the keys of groups [first, end). */
INLINE void attention_scores(const uint16_t *query, size_t width, const uint16_t *keys, int first,
                             int end, float *score) {
    amx_written();
    const size_t query_bytes = width * sizeof(uint16_t), score_bytes = PACK_KEYS * sizeof(float);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (size_t d = 0; d < width; d += AMX_K, keys += PACK_GROUPS * PACK_TILE) {
        _tile_loadd(4, query + d, query_bytes);
#define SCORE_GROUP(group, keys_tile)                                     \
    if (first <= group && group < end) {                                  \
        _tile_loadd(keys_tile, keys + group * PACK_TILE, AMX_ROW_BYTES);  \
        _tile_dpbf16ps(group, 4, keys_tile);                              \
    }
        SCORE_GROUP(0, 5)
        SCORE_GROUP(1, 6)
        SCORE_GROUP(2, 7)
        SCORE_GROUP(3, 5)
#undef SCORE_GROUP
    }
    if (first <= 0 && 0 < end) _tile_stored(0, score, score_bytes);
    if (first <= 1 && 1 < end) _tile_stored(1, score + AMX_ROWS, score_bytes);
    if (first <= 2 && 2 < end) _tile_stored(2, score + 2 * AMX_ROWS, score_bytes);
    if (first <= 3 && 3 < end) _tile_stored(3, score + 3 * AMX_ROWS, score_bytes);
}

/* The same products, bit for bit, the other way round: a group of 16 keys as they lie, `key_bytes` from one to the
 * next, times packed queries (dims / 32, 16 pairs of dims, 16 queries). Worth it where no other rows would share
 * packed keys. score: 16 columns of (16, PACK_KEYS), of the first `rows` and up to three more; turned: (16, 16). */
INLINE void attention_scores_turned(const uint16_t *key, size_t key_bytes, size_t width,
                                    const uint16_t *packed_query, int rows, float *turned, float *score) {
    amx_written();
    _tile_zero(5);
    for (size_t d = 0; d < width; d += AMX_K, packed_query += PACK_TILE) {
        _tile_loadd(6, key + d, key_bytes);
        _tile_loadd(7, packed_query, AMX_ROW_BYTES);
        _tile_dpbf16ps(5, 6, 7);
    }
    _tile_stored(5, turned, AMX_ROW_BYTES);
    const void *row[AMX_ROWS];
    for (int i = 0; i < AMX_ROWS; i++) row[i] = turned + i * AMX_ROWS;
    for (int i = 0; i < rows; i += 4)
        attention_transpose(row, (size_t)i * sizeof(float), (uint32_t *)score + i * PACK_KEYS, PACK_KEYS);
}

/* 2^a, within 3e-6 of it, a thousandth of what rounding to bf16 may lose; 0 for -inf, NaN stays NaN.
 * 2^a = 2^n 2^r with r in [0, 1), 2^r by a polynomial of degree 4 (equal ripple). */
INLINE __m512 attention_exp2(__mmask16 mask, __m512 a) {
    const __m512 r = _mm512_reduce_ps(a, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    __m512 p = _mm512_set1_ps(1.3534168e-2f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.201146e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.4144275e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.9300383e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0000026f));
    return _mm512_maskz_scalef_ps(mask, p, a);
}

/* Lane i of the result is the largest lane of row[i], or the sum of its lanes: all rows in one order. */
#define ATTENTION_FOLD(name, join)                                                                   \
    INLINE __m512 name(const __m512 *row) {                                                          \
        __m512 pair[8], four[4], eight[2];                                                           \
        for (int i = 0; i < 8; i++)                                                                  \
            pair[i] = join(_mm512_unpacklo_ps(row[2 * i], row[2 * i + 1]),                           \
                           _mm512_unpackhi_ps(row[2 * i], row[2 * i + 1]));                          \
        for (int i = 0; i < 4; i++) {                                                                \
            const __m512d a = _mm512_castps_pd(pair[2 * i]), b = _mm512_castps_pd(pair[2 * i + 1]);  \
            four[i] = join(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)),                               \
                           _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));                              \
        }                                                                                            \
        for (int i = 0; i < 2; i++)                                                                  \
            eight[i] = join(_mm512_shuffle_f32x4(four[2 * i], four[2 * i + 1], 0x88),                \
                            _mm512_shuffle_f32x4(four[2 * i], four[2 * i + 1], 0xdd));               \
        return join(_mm512_shuffle_f32x4(eight[0], eight[1], 0x88),                                  \
                    _mm512_shuffle_f32x4(eight[0], eight[1], 0xdd));                                 \
    }
ATTENTION_FOLD(attention_largest_of_each, _mm512_max_ps)
ATTENTION_FOLD(attention_total_of_each, _mm512_add_ps)
#undef ATTENTION_FOLD

/* Scores of a tile's rows (AMX_ROWS, PACK_KEYS) become weights, 2^(scale * score - maximum) in bf16; zero for keys
 * whose bit is not set in `sees`. NULL: all are. max and total: (AMX_ROWS), also of rows behind the last. */
INLINE void attention_soften_rows(const float *score, const uint64_t *sees, int rows, float scale,
                                  uint16_t *weight, float *max, float *total) {
    const __m512 scale16 = _mm512_set1_ps(scale);
    const __m512bh one = (__m512bh)_mm512_set1_epi16(0x3f80);
    __m512 each[AMX_ROWS];
    for (int i = 0; i < rows; i++) {
        const float *from = score + i * PACK_KEYS;
        __m512 top = _mm512_set1_ps(-INFINITY);
#pragma GCC unroll 4
        for (int group = 0; group < PACK_GROUPS; group++) {
            const __mmask16 mask = sees ? (__mmask16)(sees[i] >> group * AMX_ROWS) : 0xffff;
            top = _mm512_mask_max_ps(top, mask, top, _mm512_load_ps(from + group * AMX_ROWS));
        }
        each[i] = top;
    }
    for (int i = rows; i < AMX_ROWS; i++) each[i] = _mm512_setzero_ps();
    _mm512_storeu_ps(max, _mm512_mul_ps(attention_largest_of_each(each), scale16));
    for (int i = 0; i < rows; i++) {
        const float *from = score + i * PACK_KEYS;
        const __m512 max16 = _mm512_set1_ps(max[i]);
        __m512 sum = _mm512_setzero_ps();
#pragma GCC unroll 2
        for (int step = 0; step < PACK_STEPS; step++) {
            __m512 p[2];
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++) {
                const int group = 2 * step + half;
                const __mmask16 mask = sees ? (__mmask16)(sees[i] >> group * AMX_ROWS) : 0xffff;
                const __m512 s = _mm512_load_ps(from + group * AMX_ROWS);
                p[half] = attention_exp2(mask, _mm512_fmsub_ps(s, scale16, max16));
            }
            const __m512bh rounded = _mm512_cvtne2ps_pbh(p[1], p[0]);
            sum = _mm512_dpbf16_ps(sum, rounded, one);
            _mm512_store_si512((__m512i *)(weight + i * PACK_KEYS + step * AMX_K), (__m512i)rounded);
        }
        each[i] = sum;
    }
    for (int i = rows; i < AMX_ROWS; i++) each[i] = _mm512_setzero_ps();
    _mm512_storeu_ps(total, attention_total_of_each(each));
}

/* sum (16, width): of a tile's rows of weight (16, PACK_KEYS) times the packed values of steps [first, end). */
INLINE void attention_weigh_packed(const uint16_t *weight, const uint16_t *values, int first, int end,
                                   size_t width, float *sum) {
    amx_written();
    const size_t weight_bytes = PACK_KEYS * sizeof(uint16_t), sum_bytes = width * sizeof(float);
    const size_t step_values = width / AMX_ROWS * PACK_TILE;
    for (size_t d = 0; d < width; d += 2 * AMX_K) {
        const int is_wide = width - d > AMX_K;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int step = first; step < end; step++) {
            const uint16_t *from = values + (size_t)step * step_values + d / AMX_ROWS * PACK_TILE;
            _tile_loadd(4, weight + step * AMX_K, weight_bytes);
            _tile_loadd(5, from, AMX_ROW_BYTES);
            _tile_dpbf16ps(0, 4, 5);
            _tile_loadd(6, from + PACK_TILE, AMX_ROW_BYTES);
            _tile_dpbf16ps(1, 4, 6);
            if (is_wide) {
                _tile_loadd(7, from + 2 * PACK_TILE, AMX_ROW_BYTES);
                _tile_dpbf16ps(2, 4, 7);
                _tile_loadd(5, from + 3 * PACK_TILE, AMX_ROW_BYTES);
                _tile_dpbf16ps(3, 4, 5);
            }
        }
        _tile_stored(0, sum + d, sum_bytes);
        _tile_stored(1, sum + d + AMX_ROWS, sum_bytes);
        if (is_wide) {
            _tile_stored(2, sum + d + 2 * AMX_ROWS, sum_bytes);
            _tile_stored(3, sum + d + 3 * AMX_ROWS, sum_bytes);
        }
    }
}

#else
#define ATTENTION_HAS_AMX 0
#endif

#endif
