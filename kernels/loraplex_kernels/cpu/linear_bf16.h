/* Linear layers of bf16 rows in hardware bf16, on the weights of blocks.h: with amx.h's tiles, or with avx512_bf16.
 *
 * Row rule: an output is a chain over the blocks of k, 0, 1, 2 .., begun at zero. With tiles a step is one tdpbf16ps;
 * with avx512_bf16 it is sixteen vdpbf16ps, of k = 0 and 1, 2 and 3 ..; k beyond the last are zeros on both sides. The
 * chain is then multiplied by the output's scale (int8), the bias is added, and it is rounded once. How many rows and
 * outputs are computed at a time, how k is cut up (a partial sum is stored in fp32 as it is) and which thread does it
 * decide who computes a chain, never the chain. The two kinds of step differ in bits, and count subnormal numbers as
 * zeros.
 *
 * Few rows are bound by reading weights: each thread walks panels once, from front to back, and a block of eight or
 * four bits becomes bf16 in the first cache. Many rows are bound by products: a panel becomes bf16 once for all rows
 * of a group, whose inputs stay in the second cache.
 */
#ifndef LORAPLEX_LINEAR_BF16_H
#define LORAPLEX_LINEAR_BF16_H

#include "amx.h"
#include "blocks.h"
#include "pool.h"

INLINE int64_t linear_min(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t linear_max(int64_t a, int64_t b) { return a > b ? a : b; }

#if HAS_BF16

/* Rows of a step: two tiles of them; what fills the registers with two vectors of outputs each. */
#define BF16_AMX_ROWS (2 * AMX_ROWS)
#define BF16_DOT_ROWS 12
/* Most rows of a group, and bytes of their inputs: less than half the second cache of the CPUs that this is for. */
#define BF16_GROUP_ROWS 512
#define BF16_GROUP_BYTES 786432
/* Panels that a thread takes at a time, of many rows at most; of few rows so many bytes of weights. */
#define BF16_RUN_PANELS 8
#define BF16_RUN_BYTES 131072
/* Blocks of k that are expanded at a time for many rows. */
#define BF16_EXPAND 64
/* How far ahead few rows ask for their weights, in bytes. */
#define BF16_AHEAD 8192
/* A thread more for each so many weights read: about what it takes to wake one. For more rows than this products
 * count, not weights. */
#define BF16_GRAIN 131072
#define BF16_GRAIN_ROWS 128

typedef struct {
    const char *panels;
    const uint16_t *x;
    const float *bias; /* or NULL */
    uint16_t *y;
    size_t x_stride, y_stride; /* in numbers */
    size_t panel_bytes;
    int64_t num_rows, num_inputs, num_outputs, num_panels, num_blocks;
    int format, is_amx;
} bf16_work;

/* Inputs of some rows; of the last block, where k does not fill it, in `tail`: BLOCK_K numbers a row. */
typedef struct { const uint16_t *x, *tail; size_t x_stride; int64_t num_whole; } bf16_rows;

/* What memory is asked for meanwhile: `step` bytes with every block. */
typedef struct { const char *from; size_t step; } bf16_ahead;

/* Into the second cache: the first has no room for it. */
INLINE void bf16_ask(bf16_ahead *ahead) {
    for (size_t at = 0; at < ahead->step; at += 64) __builtin_prefetch(ahead->from + at, 0, 2);
    ahead->from += ahead->step;
}

/* sum[i][BLOCK_OUTPUTS] += chain over blocks begin .. end - 1 of one panel, whose block `begin` lies at `bits`. */
typedef void bf16_step(const bf16_rows *rows, const char *bits, int64_t begin, int64_t end, float *sum,
                       int from_zero, bf16_ahead ahead);

#if HAS_AMX
/* Tiles: 0 and 1 sums of the first rows, 2 and 3 of the others; 4 and 5 inputs; 6 and 7 weights. */
static void bf16_configure(int num_rows) {
    amx_config config = amx_full();
    const uint8_t first = (uint8_t)(num_rows < AMX_ROWS ? num_rows : AMX_ROWS);
    const uint8_t second = (uint8_t)(num_rows > AMX_ROWS ? num_rows - AMX_ROWS : AMX_ROWS);
    config.rows[0] = config.rows[1] = config.rows[4] = first;
    config.rows[2] = config.rows[3] = config.rows[5] = second;
    amx_configure(&config);
}

INLINE void bf16_amx(int format, int has_second, const bf16_rows *rows, const char *bits, int64_t begin,
                     int64_t end, float *sum, int from_zero, bf16_ahead ahead) {
    enum { SUM_BYTES = BLOCK_OUTPUTS * 4, HALF = BLOCK_TILE_OUTPUTS, SECOND = AMX_ROWS * BLOCK_OUTPUTS };
    char wide[2][BLOCK_BYTES] __attribute__((aligned(64)));
    amx_written();
    if (from_zero) {
        _tile_zero(0);
        _tile_zero(1);
        if (has_second) {
            _tile_zero(2);
            _tile_zero(3);
        }
    } else {
        _tile_loadd(0, sum, SUM_BYTES);
        _tile_loadd(1, sum + HALF, SUM_BYTES);
        if (has_second) {
            _tile_loadd(2, sum + SECOND, SUM_BYTES);
            _tile_loadd(3, sum + SECOND + HALF, SUM_BYTES);
        }
    }
    /* Blocks are expanded one ahead: what was just stored cannot be loaded at once. */
    if (format != BLOCK_BF16) block_expand(format, bits, wide[begin & 1]);
    for (int64_t block = begin; block < end; block++, bits += block_bytes(format)) {
        const int is_whole = block < rows->num_whole;
        const size_t stride = (is_whole ? rows->x_stride : BLOCK_K) * 2;
        const char *x = is_whole ? (const char *)(rows->x + block * BLOCK_K) : (const char *)rows->tail;
        const char *weights = bits;
        if (format != BLOCK_BF16) {
            if (block + 1 < end)
                block_expand(format, bits + block_bytes(format), wide[(block + 1) & 1]);
            weights = wide[block & 1];
            amx_written();
        }
        _tile_loadd(4, x, stride);
        _tile_loadd(6, weights, AMX_ROW_BYTES);
        _tile_loadd(7, weights + BLOCK_TILE_BYTES, AMX_ROW_BYTES);
        bf16_ask(&ahead);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (has_second) {
            _tile_loadd(5, x + AMX_ROWS * stride, stride);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sum, SUM_BYTES);
    _tile_stored(1, sum + HALF, SUM_BYTES);
    if (has_second) {
        _tile_stored(2, sum + SECOND, SUM_BYTES);
        _tile_stored(3, sum + SECOND + HALF, SUM_BYTES);
    }
}
#endif

INLINE void bf16_dot(int format, int num_rows, const bf16_rows *rows, const char *bits, int64_t begin,
                     int64_t end, float *sum, int from_zero, bf16_ahead ahead) {
    char wide[BLOCK_BYTES] __attribute__((aligned(64)));
    __m512 chain[BF16_DOT_ROWS][2];
    for (int i = 0; i < num_rows; i++)
        for (int half = 0; half < 2; half++)
            chain[i][half] = from_zero ? _mm512_setzero_ps()
                                       : _mm512_loadu_ps(sum + i * BLOCK_OUTPUTS + half * 16);
    for (int64_t block = begin; block < end; block++, bits += block_bytes(format)) {
        const int is_whole = block < rows->num_whole;
        const size_t stride = is_whole ? rows->x_stride : BLOCK_K;
        const uint16_t *x = is_whole ? rows->x + block * BLOCK_K : rows->tail;
        const char *weights = bits;
        if (format != BLOCK_BF16) {
            block_expand(format, bits, wide);
            weights = wide;
        }
        bf16_ask(&ahead);
        for (int pair = 0; pair < BLOCK_K / 2; pair++) {
            const __m512bh low = (__m512bh)_mm512_loadu_si512(weights + pair * 64);
            const __m512bh high =
                (__m512bh)_mm512_loadu_si512(weights + BLOCK_TILE_BYTES + pair * 64);
            for (int i = 0; i < num_rows; i++) {
                int two;
                memcpy(&two, x + (size_t)i * stride + 2 * pair, sizeof two);
                const __m512bh input = (__m512bh)_mm512_set1_epi32(two);
                chain[i][0] = _mm512_dpbf16_ps(chain[i][0], input, low);
                chain[i][1] = _mm512_dpbf16_ps(chain[i][1], input, high);
            }
        }
    }
    for (int i = 0; i < num_rows; i++)
        for (int half = 0; half < 2; half++)
            _mm512_storeu_ps(sum + i * BLOCK_OUTPUTS + half * 16, chain[i][half]);
}

#define BF16_STEP(name, routine, format, count)                                                  \
    static void name(const bf16_rows *rows, const char *bits, int64_t begin, int64_t end,        \
                     float *sum, int from_zero, bf16_ahead ahead) {                              \
        routine(format, count, rows, bits, begin, end, sum, from_zero, ahead);                   \
    }
#define BF16_EACH_COUNT(DO, kind)                                                            \
    DO(kind, 1) DO(kind, 2) DO(kind, 3) DO(kind, 4) DO(kind, 5) DO(kind, 6) DO(kind, 7)      \
    DO(kind, 8) DO(kind, 9) DO(kind, 10) DO(kind, 11) DO(kind, 12)
#define BF16_DOT(kind, count) BF16_STEP(bf16_dot_##kind##_##count, bf16_dot, BLOCK_##kind, count)
BF16_EACH_COUNT(BF16_DOT, BF16)
BF16_EACH_COUNT(BF16_DOT, INT8)
BF16_EACH_COUNT(BF16_DOT, INT4)
#define BF16_DOT_NAME(kind, count) bf16_dot_##kind##_##count,
/* By format - BLOCK_BF16, and rows - 1. */
static bf16_step *const bf16_dots[3][BF16_DOT_ROWS] = {
    {BF16_EACH_COUNT(BF16_DOT_NAME, BF16)},
    {BF16_EACH_COUNT(BF16_DOT_NAME, INT8)},
    {BF16_EACH_COUNT(BF16_DOT_NAME, INT4)},
};
#if HAS_AMX
#define BF16_AMX(kind)                                         \
    BF16_STEP(bf16_amx_##kind##_1, bf16_amx, BLOCK_##kind, 0)  \
    BF16_STEP(bf16_amx_##kind##_2, bf16_amx, BLOCK_##kind, 1)
BF16_AMX(BF16)
BF16_AMX(INT8)
BF16_AMX(INT4)
/* By format, and whether there are more rows than a tile has. */
static bf16_step *const bf16_tiles[3][2] = {
    {bf16_amx_BF16_1, bf16_amx_BF16_2},
    {bf16_amx_INT8_1, bf16_amx_INT8_2},
    {bf16_amx_INT4_1, bf16_amx_INT4_2},
};
#endif

/* The step for so many rows; tiles are configured for it. */
static bf16_step *bf16_open(int is_amx, int format, int num_rows) {
#if HAS_AMX
    if (is_amx) {
        bf16_configure(num_rows);
        return bf16_tiles[format - BLOCK_BF16][num_rows > AMX_ROWS];
    }
#endif
    (void)is_amx;
    return bf16_dots[format - BLOCK_BF16][num_rows - 1];
}

/* Where the outputs of a row and a panel go. */
INLINE uint16_t *bf16_out(const bf16_work *work, int64_t row, int64_t panel) {
    return work->y + (size_t)row * work->y_stride + (size_t)panel * BLOCK_OUTPUTS;
}

/* Scales finished chains of a panel, adds the bias, rounds them and stores them, a line of the cache a row. */
static void bf16_finish(const bf16_work *work, const float *sum, int64_t row, int64_t num_rows,
                        int64_t panel) {
    const int64_t first = panel * BLOCK_OUTPUTS;
    const int64_t count = linear_min(BLOCK_OUTPUTS, work->num_outputs - first);
    const uint32_t is_real = (uint32_t)((1ull << count) - 1u);
    const int is_int8 = work->format == BLOCK_INT8;
    const float *scales = (const float *)(work->panels + (size_t)panel * work->panel_bytes);
    __m512 scale[2], bias[2];
    for (int half = 0; half < 2; half++) {
        const __mmask16 is_own = (__mmask16)(is_real >> (16 * half));
        scale[half] = is_int8 ? _mm512_loadu_ps(scales + half * 16) : _mm512_setzero_ps();
        bias[half] = work->bias ? _mm512_maskz_loadu_ps(is_own, work->bias + first + half * 16)
                                : _mm512_setzero_ps();
    }
    uint16_t *to = bf16_out(work, row, panel);
    for (int64_t i = 0; i < num_rows; i++, to += work->y_stride, sum += BLOCK_OUTPUTS) {
        __m512 value[2];
        for (int half = 0; half < 2; half++) {
            value[half] = _mm512_loadu_ps(sum + half * 16);
            if (is_int8) value[half] = _mm512_mul_ps(value[half], scale[half]);
            if (work->bias) value[half] = _mm512_add_ps(value[half], bias[half]);
        }
        const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(value[1], value[0]);
        if (count == BLOCK_OUTPUTS)
            _mm512_storeu_si512(to, both);
        else
            _mm512_mask_storeu_epi16(to, is_real, both);
    }
}

/* Rows row .. as the steps take them; `tail` has BLOCK_K numbers for each. */
static bf16_rows bf16_take(const bf16_work *work, int64_t row, int64_t num_rows, uint16_t *tail) {
    const bf16_rows rows = {
        .x = work->x + (size_t)row * work->x_stride,
        .tail = tail,
        .x_stride = work->x_stride,
        .num_whole = work->num_inputs / BLOCK_K,
    };
    const size_t done = (size_t)rows.num_whole * BLOCK_K, left = (size_t)work->num_inputs - done;
    if (left == 0) return rows;
    memset(tail, 0, (size_t)num_rows * BLOCK_K * 2);
    for (int64_t i = 0; i < num_rows; i++)
        memcpy(tail + i * BLOCK_K, rows.x + (size_t)i * rows.x_stride + done, left * 2);
    return rows;
}

/* No more rows than a step has, on panels first .. end - 1. */
static void bf16_few(const bf16_work *work, int64_t row, int64_t num_rows, int64_t first, int64_t end) {
    uint16_t tail[BF16_AMX_ROWS * BLOCK_K];
    float sum[BF16_AMX_ROWS * BLOCK_OUTPUTS] __attribute__((aligned(64)));
    const bf16_rows rows = bf16_take(work, row, num_rows, tail);
    bf16_step *const step = bf16_open(work->is_amx, work->format, (int)num_rows);
    for (int64_t at = first; at < end; at++) {
        const char *bits =
            work->panels + (size_t)at * work->panel_bytes + block_header(work->format);
        const bf16_ahead ahead = {bits + BF16_AHEAD, block_bytes(work->format)};
        step(&rows, bits, 0, work->num_blocks, sum, 1, ahead);
        bf16_finish(work, sum, row, num_rows, at);
    }
}

/* A group of rows on panels first .. end - 1. */
static void bf16_many(const bf16_work *work, int64_t row, int64_t num_rows, int64_t first, int64_t end) {
    uint16_t tail[BF16_GROUP_ROWS * BLOCK_K];
    float sum[BF16_GROUP_ROWS * BLOCK_OUTPUTS] __attribute__((aligned(64)));
    char wide[BF16_EXPAND * BLOCK_BYTES] __attribute__((aligned(64)));
    const int64_t size = work->is_amx ? BF16_AMX_ROWS : BF16_DOT_ROWS;
    const int64_t num_steps = num_rows / size;
    const int64_t expand = work->format == BLOCK_BF16 ? work->num_blocks : BF16_EXPAND;
    /* Sums outlive a step only where k is cut up. */
    const int64_t sum_rows = expand < work->num_blocks ? size : 0;
    const bf16_rows rows = bf16_take(work, row, num_steps * size, tail);
    bf16_step *const step = bf16_open(work->is_amx, BLOCK_BF16, (int)size);
    for (int64_t at = first; at < end; at++) {
        const char *panel = work->panels + (size_t)at * work->panel_bytes;
        for (int64_t begin = 0; begin < work->num_blocks; begin += expand) {
            const int64_t past = linear_min(begin + expand, work->num_blocks);
            const char *bits =
                panel + block_header(work->format) + (size_t)begin * block_bytes(work->format);
            const char *weights = bits;
            if (work->format != BLOCK_BF16) {
                for (int64_t block = begin; block < past; block++, bits += block_bytes(work->format))
                    block_expand(work->format, bits, wide + (block - begin) * BLOCK_BYTES);
                weights = wide;
            }
            /* The steps fetch the next panel, a share each. */
            const size_t share =
                (block_bytes(work->format) / 64 + (size_t)num_steps - 1) / (size_t)num_steps * 64;
            const char *next = panel + work->panel_bytes;
            for (int64_t i = 0; i < num_steps; i++) {
                bf16_rows own = rows;
                own.x += (size_t)(i * size) * rows.x_stride;
                own.tail += i * size * BLOCK_K;
                float *own_sum = sum + i * sum_rows * BLOCK_OUTPUTS;
                const bf16_ahead ahead = {
                    next + ((size_t)i * (size_t)work->num_blocks + (size_t)begin) * share, share};
                /* Where the results go is asked for while they are computed. */
                if (past == work->num_blocks)
                    for (int64_t j = 0; j < size; j++)
                        __builtin_prefetch(bf16_out(work, row + i * size + j, at), 1);
                step(&own, weights, begin, past, own_sum, begin == 0, ahead);
                if (past == work->num_blocks) bf16_finish(work, own_sum, row + i * size, size, at);
            }
        }
    }
    if (num_steps * size < num_rows)
        bf16_few(work, row + num_steps * size, num_rows - num_steps * size, first, end);
}

/* How a product is cut up: runs of panels, and groups of rows outermost, so that threads that work on one share
 * its inputs. */
typedef struct {
    const bf16_work *work;
    int64_t size; /* rows of a step */
    int64_t group_rows;
    int64_t run;
    int64_t num_runs;
} bf16_job;

static void bf16_share(void *context, pool_share *share, int64_t item, int32_t thread) {
    const bf16_job job = *(const bf16_job *)context;
    const bf16_work work = *job.work;
    (void)thread;
    for (; item >= 0; item = pool_next(share)) {
        const int64_t first = item % job.num_runs * job.run;
        const int64_t end = linear_min(first + job.run, work.num_panels);
        const int64_t row = item / job.num_runs * job.group_rows;
        const int64_t num_rows = linear_min(job.group_rows, work.num_rows - row);
        if (num_rows <= 0) continue;
        if (num_rows <= job.size)
            bf16_few(&work, row, num_rows, first, end);
        else
            bf16_many(&work, row, num_rows, first, end);
    }
#if HAS_AMX
    if (work.is_amx) amx_release();
#endif
}

static void bf16_forward(const bf16_work *work, int num_threads) {
    const int64_t size = work->is_amx ? BF16_AMX_ROWS : BF16_DOT_ROWS;
    const int64_t cost = work->num_inputs * work->num_outputs *
                         linear_max(1, work->num_rows / BF16_GRAIN_ROWS);
    const int threads = (int)linear_max(1, linear_min(num_threads, cost / BF16_GRAIN));
    const int is_few = work->num_rows <= size;
    const int64_t most = linear_min(
        BF16_GROUP_ROWS, linear_max(1, BF16_GROUP_BYTES / 2 / work->num_inputs)) / size * size;
    const int64_t group = linear_max(size, most);
    /* Groups of about as many rows each, in whole steps. */
    const int64_t num_groups = is_few ? 1 : (work->num_rows + group - 1) / group;
    const int64_t num_steps = (work->num_rows + size - 1) / size;
    const int64_t group_steps = (num_steps + num_groups - 1) / num_groups;
    /* Several pieces a thread: they end at different times. */
    int64_t run = work->num_panels * num_groups / (4 * threads);
    run = linear_min(run, is_few ? (int64_t)(BF16_RUN_BYTES / work->panel_bytes) : BF16_RUN_PANELS);
    run = linear_max(run, 1);
    bf16_job job = {work, size, group_steps * size, run, (work->num_panels + run - 1) / run};
    pool_run(bf16_share, &job, job.num_runs * num_groups, threads);
}
#endif

#endif
