/* LoRA on bf16 rows in the CPU's matrix tiles (amx.h): up to 16 rows of one adapter at a time.
 *
 * Weights are one or two planes of bf16: bf16 as stored, or else w = low + high, within 2^-16 |w| of what is
 * stored, and exact for fp16. Both halves are products in tiles, for every number of rows, each sum in one fixed order:
 *   - shrink, h[r] = scale * <a[r], x>, low before high, in steps of 32 k;
 *   - h is split into two bf16, h = hi + lo, within 2^-16 |h| of it, so that B may meet it in tiles. (One bf16,
 *     as PEFT keeps h of a bf16 model, would be within 2^-8 |h|.) Beyond bf16's largest number hi is Inf;
 *   - expand, d[n] = sum over planes, low before high, and steps of ranks of <b[n], lo> + <b[n], hi>;
 *     y[n] = round(y[n] + d[n]), once.
 * Subnormal numbers count as zero, in a tile and where a number is rounded to bf16.
 *
 * Layout. A slice's ranks are padded with zeros to `lora_padded_rank`: equal steps of at most 32, each even.
 *   a: the padded ranks of all slices side by side, to a multiple of 8, in blocks of 16, the last of 16 or 8:
 *      by block (planes, ceil(K / 32) * 16 pairs of k, ranks of the block, 2), zeros for k that do not exist;
 *   b: of a slice, (ceil(N / 16), planes, padded rank / 2, 16 outputs, 2), zeros for outputs that do not exist;
 *   h: of a row, hi of all padded ranks, to a multiple of 16, and then lo of as many.
 */
#ifndef LORAPLEX_LORA_TILES_H
#define LORAPLEX_LORA_TILES_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "amx.h"
#include "simd.h"

#define LORA_TILE 16       /* rows, ranks or outputs of a tile */
#define LORA_TILE_OUTPUTS 64 /* outputs computed together: four tiles of sums */

/* Ranks of one product with h. */
INLINE int lora_rank_step(int rank) {
    const int steps = (rank + AMX_K - 1) / AMX_K;
    return steps == 0 ? 0 : ((rank + steps - 1) / steps + 1) / 2 * 2;
}
INLINE int lora_padded_rank(int rank) { return (rank + AMX_K - 1) / AMX_K * lora_rank_step(rank); }

INLINE size_t lora_tiles_round_up(size_t count, size_t multiple) {
    return (count + multiple - 1) / multiple * multiple;
}

/* The planes that weights need: 1 where bf16 holds all of them, else 2; 0 where some are too large for bf16. */
static int lora_planes_of(const void *weights, size_t count) {
    uint32_t rest = 0;
    int is_finite = 1;
    for (size_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, (const char *)weights + i * sizeof bits, sizeof bits);
        rest |= bits & 0xffffu;
        /* Rounded to bf16 this and all above it are Inf, or NaN. */
        is_finite &= (bits & 0x7fffffffu) < 0x7f7f8000u;
    }
    return !is_finite ? 0 : rest == 0 ? 1 : 2;
}

/* Both planes of a weight; a file's tensors lie at any address. */
INLINE void lora_split(const void *weights, size_t at, int is_bf16, uint16_t *low, uint16_t *high) {
    if (is_bf16) {
        *low = 0;
        memcpy(high, (const char *)weights + at * sizeof *high, sizeof *high);
        return;
    }
    float weight;
    memcpy(&weight, (const char *)weights + at * sizeof weight, sizeof weight);
    *high = narrow_bf16(weight);
    *low = narrow_bf16(weight - widen_bf16(*high));
}

/* A matrix (num_rows, num_columns) into its place among `total_rows` (a multiple of 8) in blocks of 16 rows:
 * by block (planes, depth / 2 pairs of columns, rows of the block, 2). depth is even; what is not written stays. */
static void lora_lay_out(uint16_t *to, const void *weights, int is_bf16, size_t planes,
                         size_t num_rows, size_t num_columns, size_t begin, size_t total_rows,
                         size_t depth) {
    for (size_t i = 0; i < num_rows; i++) {
        const size_t at = begin + i, block = at / LORA_TILE, lane = at % LORA_TILE;
        const size_t left = total_rows - block * LORA_TILE;
        const size_t width = left < LORA_TILE ? left : LORA_TILE;
        uint16_t *first = to + block * LORA_TILE * planes * depth + 2 * lane;
        uint16_t *last = first + (planes - 1) * width * depth;
        for (size_t k = 0; k < num_columns; k++) {
            const size_t place = k / 2 * (2 * width) + k % 2;
            uint16_t low, high;
            lora_split(weights, i * num_columns + k, is_bf16, &low, &high);
            if (planes > 1) first[place] = low;
            last[place] = high;
        }
    }
}

/* Weights that are read once are on their way this many bytes ahead. */
#define LORA_AHEAD 4096
INLINE void lora_fetch(const void *from, size_t bytes) {
    for (size_t at = 0; at < bytes; at += 64) __builtin_prefetch((const char *)from + at, 0, 3);
}

#if HAS_AMX && defined(__AVX512F__) && defined(__AVX512BF16__)
#define HAS_LORA_TILES 1

/* How the running thread's tiles are configured; all zero: not at all. */
typedef struct {
    int rows;
    int rank_step; /* 0: for shrink */
} lora_tile_shape;

/* Which tile holds what (intrinsics want numbers):
 *   shrink: 0-2 sums of a block of 16 ranks each, 3 of one of 8; 4 x; 5, 6 the blocks' a, 7 that of the block of 8;
 *   expand: 0-3 sums of 16 outputs each; 4 lo, 5 hi; 6, 7 b. */
static void lora_tiles_configure(lora_tile_shape *now, lora_tile_shape want) {
    if (now->rows == want.rows && now->rank_step == want.rank_step) return;
    amx_config config = amx_full();
    for (int i = 0; i < 5; i++) config.rows[i] = (uint8_t)want.rows;
    if (want.rank_step == 0) {
        config.row_bytes[3] = config.row_bytes[7] = AMX_ROW_BYTES / 2;
    } else {
        config.rows[5] = (uint8_t)want.rows;
        config.row_bytes[4] = config.row_bytes[5] = (uint16_t)(2 * want.rank_step);
        config.rows[6] = config.rows[7] = (uint8_t)(want.rank_step / 2);
    }
    amx_configure(&config);
    *now = want;
}

INLINE void lora_tiles_release(lora_tile_shape *now) {
    if (now->rows) amx_release();
    *now = (lora_tile_shape){0};
}

INLINE __m512 lora_widen(__m256i bits) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

/* Adds up `planes` times `steps` products of x with `full` blocks of 16 ranks and, if `narrow`, one of 8. */
INLINE void lora_tiles_dots(const char *x, size_t x_stride, const char *a, size_t block_bytes,
                            size_t steps, size_t planes, int full, int narrow) {
    const char *last = a + (size_t)full * block_bytes;
    if (full > 0) _tile_zero(0);
    if (full > 1) _tile_zero(1);
    if (full > 2) _tile_zero(2);
    if (narrow) _tile_zero(3);
    for (size_t k = 0, x_k = 0; k < planes * steps; k++, x_k++) {
        if (x_k == steps) x_k = 0;
        const char *a_k = a + k * (AMX_ROWS * AMX_ROW_BYTES);
        _tile_loadd(4, x + x_k * AMX_ROW_BYTES, x_stride);
        if (full > 0) {
            lora_fetch(a_k + LORA_AHEAD, AMX_ROWS * AMX_ROW_BYTES);
            _tile_loadd(5, a_k, AMX_ROW_BYTES);
            _tile_dpbf16ps(0, 4, 5);
        }
        if (full > 1) {
            lora_fetch(a_k + block_bytes + LORA_AHEAD, AMX_ROWS * AMX_ROW_BYTES);
            _tile_loadd(6, a_k + block_bytes, AMX_ROW_BYTES);
            _tile_dpbf16ps(1, 4, 6);
        }
        if (full > 2) {
            lora_fetch(a_k + 2 * block_bytes + LORA_AHEAD, AMX_ROWS * AMX_ROW_BYTES);
            _tile_loadd(5, a_k + 2 * block_bytes, AMX_ROW_BYTES);
            _tile_dpbf16ps(2, 4, 5);
        }
        if (narrow) {
            const char *last_k = last + k * (AMX_ROWS * AMX_ROW_BYTES / 2);
            lora_fetch(last_k + LORA_AHEAD, AMX_ROWS * AMX_ROW_BYTES / 2);
            _tile_loadd(7, last_k, AMX_ROW_BYTES / 2);
            _tile_dpbf16ps(3, 4, 7);
        }
    }
}

typedef struct {
    const float *scale;  /* by slice */
    const int32_t *rank; /* by slice */
    int num_slices;
    int padded_total; /* ranks of all slices, padded */
} lora_tile_ranks;

/* hi and lo of scale * sum for a block of ranks; zero at ranks that do not exist, by selection. */
static void lora_tiles_split(const float *sum, int rows, lora_tile_ranks ranks, int block, uint16_t *h,
                             size_t h_stride) {
    float scale[LORA_TILE] = {0};
    uint32_t exists = 0;
    for (int s = 0, begin = -block * LORA_TILE; s < ranks.num_slices; s++) {
        for (int r = begin < 0 ? 0 : begin; r < begin + ranks.rank[s] && r < LORA_TILE; r++) {
            scale[r] = ranks.scale[s];
            exists |= 1u << r;
        }
        begin += lora_padded_rank(ranks.rank[s]);
    }
    const __m512 scales = _mm512_loadu_ps(scale);
    const size_t lo_at = lora_tiles_round_up((size_t)ranks.padded_total, LORA_TILE);
    h += block * LORA_TILE;
    for (int i = 0; i < rows; i++, h += h_stride) {
        const __m512 value =
            _mm512_maskz_mul_ps((__mmask16)exists, _mm512_load_ps(sum + i * LORA_TILE), scales);
        const __m256i hi = (__m256i)_mm512_cvtneps_pbh(value);
        const __m512 rest = _mm512_sub_ps(value, lora_widen(hi));
        /* Where hi is not finite the rest would be NaN, or Inf of the wrong sign. */
        const __m512 finite = _mm512_maskz_mov_ps(
            _mm512_cmp_ps_mask(_mm512_abs_ps(rest), _mm512_set1_ps(INFINITY), _CMP_LT_OQ), rest);
        _mm256_storeu_si256((__m256i *)h, hi);
        _mm256_storeu_si256((__m256i *)(h + lo_at), (__m256i)_mm512_cvtneps_pbh(finite));
    }
}

/* Blocks [first, end) of a chunk's ranks. x has `rows` rows of whole steps, x_stride bytes apart; h_stride is in
 * halves of floats. */
static void lora_tiles_shrink(lora_tile_shape *shape, const char *x, size_t x_stride, const char *a,
                              size_t steps, size_t planes, int rows, lora_tile_ranks ranks, int first,
                              int end, uint16_t *h, size_t h_stride) {
    float sum[4][LORA_TILE * LORA_TILE] __attribute__((aligned(64)));
    const size_t block_bytes = planes * steps * AMX_ROWS * AMX_ROW_BYTES;
    const int padded = (ranks.padded_total + 7) / 8 * 8, num_full = padded / LORA_TILE;
    lora_tiles_configure(shape, (lora_tile_shape){rows, 0});
    amx_written();
    for (int block = first; block < end;) {
        int full = (end < num_full ? end : num_full) - block;
        full = full > 3 ? 3 : full;
        const int narrow = block + full == num_full && end > num_full;
        const char *from = a + (size_t)block * block_bytes;
        switch (2 * full + narrow) {
        case 1: lora_tiles_dots(x, x_stride, from, block_bytes, steps, planes, 0, 1); break;
        case 2: lora_tiles_dots(x, x_stride, from, block_bytes, steps, planes, 1, 0); break;
        case 3: lora_tiles_dots(x, x_stride, from, block_bytes, steps, planes, 1, 1); break;
        case 4: lora_tiles_dots(x, x_stride, from, block_bytes, steps, planes, 2, 0); break;
        case 5: lora_tiles_dots(x, x_stride, from, block_bytes, steps, planes, 2, 1); break;
        case 6: lora_tiles_dots(x, x_stride, from, block_bytes, steps, planes, 3, 0); break;
        default: lora_tiles_dots(x, x_stride, from, block_bytes, steps, planes, 3, 1); break;
        }
        if (full > 0) _tile_stored(0, sum[0], AMX_ROW_BYTES);
        if (full > 1) _tile_stored(1, sum[1], AMX_ROW_BYTES);
        if (full > 2) _tile_stored(2, sum[2], AMX_ROW_BYTES);
        if (narrow) _tile_stored(3, sum[full], AMX_ROW_BYTES);
        for (int j = 0; j < full + narrow; j++)
            lora_tiles_split(sum[j], rows, ranks, block + j, h, h_stride);
        block += full + narrow;
    }
}

/* d of up to four blocks of outputs, into tiles of sums. */
INLINE void lora_tiles_weigh(const uint16_t *hi, const uint16_t *lo, size_t h_bytes, const char *b,
                             size_t block_bytes, int rank_step, int steps, int planes, int blocks) {
    _tile_zero(0);
    if (blocks > 1) _tile_zero(1);
    if (blocks > 2) _tile_zero(2);
    if (blocks > 3) _tile_zero(3);
    for (int s = 0, h_s = 0; s < planes * steps; s++, h_s++) {
        if (h_s == steps) h_s = 0;
        /* One step's h stays in its tiles from one group of blocks to the next. */
        if (steps > 1) {
            _tile_loadd(4, lo + h_s * rank_step, h_bytes);
            _tile_loadd(5, hi + h_s * rank_step, h_bytes);
        }
        const char *b_s = b + (size_t)(s * rank_step / 2) * AMX_ROW_BYTES;
        _tile_loadd(6, b_s, AMX_ROW_BYTES);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(0, 5, 6);
        if (blocks > 1) {
            _tile_loadd(7, b_s + block_bytes, AMX_ROW_BYTES);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(1, 5, 7);
        }
        if (blocks > 2) {
            _tile_loadd(6, b_s + 2 * block_bytes, AMX_ROW_BYTES);
            _tile_dpbf16ps(2, 4, 6);
            _tile_dpbf16ps(2, 5, 6);
        }
        if (blocks > 3) {
            _tile_loadd(7, b_s + 3 * block_bytes, AMX_ROW_BYTES);
            _tile_dpbf16ps(3, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
}

/* y[0 .. count) += d, rounded once; what follows in y is needed next. */
INLINE void lora_tiles_add(uint16_t *y, const float *d, size_t count) {
    lora_fetch((const char *)(y + LORA_TILE_OUTPUTS), LORA_TILE_OUTPUTS * sizeof *y);
    size_t n = 0;
    for (; n + 2 * LORA_TILE <= count; n += 2 * LORA_TILE) {
        const __m512i old = _mm512_loadu_si512(y + n);
        const __m512 low = _mm512_add_ps(lora_widen(_mm512_castsi512_si256(old)), _mm512_load_ps(d + n));
        const __m512 high = _mm512_add_ps(lora_widen(_mm512_extracti64x4_epi64(old, 1)),
                                          _mm512_load_ps(d + n + LORA_TILE));
        _mm512_storeu_si512(y + n, (__m512i)_mm512_cvtne2ps_pbh(high, low));
    }
    for (; n < count; n += LORA_TILE) {
        const __mmask16 exists =
            (__mmask16)(count - n < LORA_TILE ? (1u << (count - n)) - 1 : 0xffff);
        const __m256i old = _mm256_maskz_loadu_epi16(exists, y + n);
        const __m512 new = _mm512_add_ps(lora_widen(old), _mm512_load_ps(d + n));
        _mm256_mask_storeu_epi16(y + n, exists, (__m256i)_mm512_cvtneps_pbh(new));
    }
}

/* Outputs [n, end) of a slice for a chunk's rows; n is a multiple of LORA_TILE_OUTPUTS, y_index of output 0, hi
 * and lo of the slice's first rank. */
static void lora_tiles_expand(lora_tile_shape *shape, uint16_t *y, const size_t *y_index, int rows,
                              const uint16_t *hi, const uint16_t *lo, size_t h_bytes, const char *b,
                              int planes, int rank, size_t n, size_t end) {
    float sum[LORA_TILE * LORA_TILE_OUTPUTS] __attribute__((aligned(64)));
    const size_t sum_bytes = LORA_TILE_OUTPUTS * sizeof(float);
    const int rank_step = lora_rank_step(rank), steps = lora_padded_rank(rank) / rank_step;
    const size_t block_bytes = (size_t)(planes * lora_padded_rank(rank) / 2) * AMX_ROW_BYTES;
    lora_tiles_configure(shape, (lora_tile_shape){rows, rank_step});
    amx_written();
    _tile_loadd(4, lo, h_bytes);
    _tile_loadd(5, hi, h_bytes);
    for (; n < end; n += LORA_TILE_OUTPUTS) {
        const char *b_n = b + n / LORA_TILE * block_bytes;
        const size_t count = end - n < LORA_TILE_OUTPUTS ? end - n : LORA_TILE_OUTPUTS;
        const int blocks = (int)(count + LORA_TILE - 1) / LORA_TILE;
        lora_fetch(b_n + LORA_AHEAD, (size_t)blocks * block_bytes);
        switch (blocks) {
        case 1: lora_tiles_weigh(hi, lo, h_bytes, b_n, block_bytes, rank_step, steps, planes, 1); break;
        case 2: lora_tiles_weigh(hi, lo, h_bytes, b_n, block_bytes, rank_step, steps, planes, 2); break;
        case 3: lora_tiles_weigh(hi, lo, h_bytes, b_n, block_bytes, rank_step, steps, planes, 3); break;
        default: lora_tiles_weigh(hi, lo, h_bytes, b_n, block_bytes, rank_step, steps, planes, 4); break;
        }
        _tile_stored(0, sum, sum_bytes);
        if (blocks > 1) _tile_stored(1, sum + LORA_TILE, sum_bytes);
        if (blocks > 2) _tile_stored(2, sum + 2 * LORA_TILE, sum_bytes);
        if (blocks > 3) _tile_stored(3, sum + 3 * LORA_TILE, sum_bytes);
        for (int i = 0; i < rows; i++)
            lora_tiles_add(y + y_index[i] + n, sum + i * LORA_TILE_OUTPUTS, count);
    }
}
#else
#define HAS_LORA_TILES 0
typedef int lora_tile_shape;
INLINE void lora_tiles_release(lora_tile_shape *now) { (void)now; }
#endif

#endif
