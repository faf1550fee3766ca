/* Linear layers: y = x W^T + b for fp32 or bf16 rows and weights in one of the formats of panels.h; or for bf16 rows
 * in hardware bf16, with weights as in blocks.h: see linear_bf16.h. Of the former:
 *
 * Row rule: an output is one chain of fused multiply-adds over k = 0, 1, 2 .. in fp32, begun at zero, then the
 * bias is added, then it is rounded once to y's type. How many rows and panels a tile takes, how k is cut up
 * (a partial sum is stored in fp32 as it is) and which thread does it decide who computes a chain, never the
 * chain. So there are no padded rows, and narrow weights give the very bits of fp32 weights of the same value.
 *
 * Few rows are bound by reading weights: each thread walks runs of panels once, and takes several at a time
 * where one has too few chains to hide the latency of an FMA. Many rows are bound by FMAs: a block of k of a
 * panel is widened to fp32 once, stays in the first cache and meets all rows of a block, whose inputs stay in
 * the second.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "calls.h"
#include "linear_bf16.h"
#include "panels.h"
#include "pool.h"
#include "simd.h"

linear_forward_call linear_forward;

/* Rows of a tile: with two vectors of outputs each, their chains fill the registers. */
#if LANES == 16
#define LINEAR_ROWS 12
#else
#define LINEAR_ROWS 6
#endif
/* Most panels of a tile. One row has two chains a panel, and an FMA's latency is that of eight; to widen four or
 * eight bits takes registers too. */
#define LINEAR_PANELS 4
#define LINEAR_WIDE(format, rows) \
    ((rows) == 1 ? (format) == PANEL_INT4 ? 2 : 4 : (rows) <= 3 ? 2 : 1)
/* How far ahead few rows ask for their weights, in bytes. */
#define LINEAR_AHEAD 1024
/* Inputs of a block of k: a panel's fp32 weights of them take half the first cache. A multiple of PANEL_GROUP. */
#define LINEAR_BLOCK_K 256
/* Rows of a block: their inputs of a block of k take less than half the second cache. */
#define LINEAR_BLOCK_ROWS 192
/* Panels that a thread takes at a time, of many rows at most. */
#define LINEAR_BLOCK_PANELS 8
/* Bytes of weights that a thread takes at a time, of few rows at most. */
#define LINEAR_RUN_BYTES 131072
/* A thread more for each so many multiplications: 10 to 20 us, about what it takes to wake one. */
#define LINEAR_GRAIN 131072

typedef struct {
    const char *panels;
    const float *x;      /* (num_rows, num_inputs) */
    const float *bias;   /* or NULL */
    void *y;
    size_t x_stride, y_stride;  /* in numbers */
    size_t panel_bytes;
    int64_t num_rows, num_inputs, num_outputs, num_panels;
    int format, is_bf16;
} linear_work;

/* What a tile asks memory for while it computes: `step` bytes further with every chunk. */
typedef struct { const char *from; size_t step; } linear_ahead;

/* sum[i][p * PANEL ..] += chain over k of rows i and panels p; the first of them begins with zero. */
INLINE void linear_tile(int format, int rows, int panels, const char *const panel[LINEAR_PANELS],
                        const float *x, size_t x_stride, int64_t begin, int64_t end, float *sum,
                        size_t sum_stride, int from_zero, linear_ahead ahead) {
    lanes_f chain[LINEAR_ROWS][LINEAR_PANELS][2];
    for (int i = 0; i < rows; i++)
        for (int p = 0; p < panels; p++)
            for (int half = 0; half < 2; half++)
                chain[i][p][half] =
                    from_zero ? lanes_all(0.0f)
                              : lanes_load(sum + (size_t)i * sum_stride + p * PANEL + half * LANES);
    const int chunk = panel_chunk(format);
    const char *bits[LINEAR_PANELS];
    for (int64_t k = begin; k < end;) {
        const int64_t group_end =
            end - k < panel_group(format) ? end : k + panel_group(format);
        panel_scales scales[LINEAR_PANELS];
        for (int p = 0; p < panels; p++) {
            panel_read_scales(format, panel[p], k, &scales[p]);
            bits[p] = panel_bits(format, panel[p], k);
        }
#define LINEAR_STEP(place)                                                                \
    do {                                                                                  \
        lanes_f weight[LINEAR_PANELS][2];                                                 \
        for (int p = 0; p < panels; p++)                                                  \
            panel_weights(format, bits[p], place, &scales[p], weight[p]);                 \
        for (int i = 0; i < rows; i++) {                                                  \
            const lanes_f input = lanes_all(x[(size_t)i * x_stride + (size_t)(k + place)]); \
            for (int p = 0; p < panels; p++)                                              \
                for (int half = 0; half < 2; half++)                                      \
                    chain[i][p][half] =                                                   \
                        lanes_fma(input, weight[p][half], chain[i][p][half]);             \
        }                                                                                 \
    } while (0)
        for (; k + chunk <= group_end; k += chunk) {
            for (int place = 0; place < chunk; place++) LINEAR_STEP(place);
            for (int p = 0; p < panels; p++) {
                bits[p] += panel_chunk_bytes(format);
                if (panels > 1) __builtin_prefetch(bits[p] + LINEAR_AHEAD);
            }
            if (panels == 1) {
                __builtin_prefetch(ahead.from);
                ahead.from += ahead.step;
            }
        }
        const int left = (int)(group_end - k);
        for (int place = 0; place < chunk - 1; place++)
            if (place < left) LINEAR_STEP(place);
        k = group_end;
#undef LINEAR_STEP
    }
    for (int i = 0; i < rows; i++)
        for (int p = 0; p < panels; p++)
            for (int half = 0; half < 2; half++)
                lanes_store(sum + (size_t)i * sum_stride + p * PANEL + half * LANES,
                            chain[i][p][half]);
}

typedef void linear_tile_fn(const char *const panel[LINEAR_PANELS], const float *x, size_t x_stride,
                            int64_t begin, int64_t end, float *sum, size_t sum_stride,
                            int from_zero, linear_ahead ahead);

#define LINEAR_DEFINE(name, format, rows, panels)                                                \
    static void name(const char *const panel[LINEAR_PANELS], const float *x, size_t x_stride,    \
                     int64_t begin, int64_t end, float *sum, size_t sum_stride, int from_zero,   \
                     linear_ahead ahead) {                                                       \
        linear_tile(format, rows, panels, panel, x, x_stride, begin, end, sum, sum_stride,       \
                    from_zero, ahead);                                                           \
    }
#define LINEAR_DEFINE_ROWS(kind, rows)                                                 \
    LINEAR_DEFINE(linear_##kind##_##rows, PANEL_##kind, rows, 1)                       \
    LINEAR_DEFINE(linear_##kind##_##rows##_wide, PANEL_##kind, rows, LINEAR_WIDE(PANEL_##kind, rows))
#if LINEAR_ROWS == 12
#define LINEAR_EACH_ROWS(DO, kind)                                                           \
    DO(kind, 1) DO(kind, 2) DO(kind, 3) DO(kind, 4) DO(kind, 5) DO(kind, 6) DO(kind, 7)      \
    DO(kind, 8) DO(kind, 9) DO(kind, 10) DO(kind, 11) DO(kind, 12)
#else
#define LINEAR_EACH_ROWS(DO, kind) \
    DO(kind, 1) DO(kind, 2) DO(kind, 3) DO(kind, 4) DO(kind, 5) DO(kind, 6)
#endif
LINEAR_EACH_ROWS(LINEAR_DEFINE_ROWS, FP32)
LINEAR_EACH_ROWS(LINEAR_DEFINE_ROWS, BF16)
LINEAR_EACH_ROWS(LINEAR_DEFINE_ROWS, INT8)
LINEAR_EACH_ROWS(LINEAR_DEFINE_ROWS, INT4)

#define LINEAR_NAME(kind, rows) {linear_##kind##_##rows, linear_##kind##_##rows##_wide},
/* By format and rows - 1: of one panel, of several. */
static linear_tile_fn *const linear_tiles[PANEL_FORMATS][LINEAR_ROWS][2] = {
    {LINEAR_EACH_ROWS(LINEAR_NAME, FP32)},
    {LINEAR_EACH_ROWS(LINEAR_NAME, BF16)},
    {LINEAR_EACH_ROWS(LINEAR_NAME, INT8)},
    {LINEAR_EACH_ROWS(LINEAR_NAME, INT4)},
};

/* Inputs begin .. end - 1 of a panel as fp32, `to` the place of `begin`. */
INLINE void linear_expand_as(int format, const char *panel, int64_t begin, int64_t end, float *to) {
    const int chunk = panel_chunk(format);
    for (int64_t k = begin; k < end;) {
        const int64_t group_end = end - k < panel_group(format) ? end : k + panel_group(format);
        panel_scales scales;
        panel_read_scales(format, panel, k, &scales);
        const char *bits = panel_bits(format, panel, k);
        /* The last chunk may hold a k beyond the end, and `to` has room for it. */
        for (; k < group_end; k += chunk, bits += panel_chunk_bytes(format))
            for (int place = 0; place < chunk; place++, to += PANEL) {
                lanes_f weight[2];
                panel_weights(format, bits, place, &scales, weight);
                lanes_store(to, weight[0]);
                lanes_store(to + LANES, weight[1]);
            }
        k = group_end;
    }
}

static void linear_expand(int format, const char *panel, int64_t begin, int64_t end, float *to) {
    if (format == PANEL_BF16) linear_expand_as(PANEL_BF16, panel, begin, end, to);
    if (format == PANEL_INT8) linear_expand_as(PANEL_INT8, panel, begin, end, to);
    if (format == PANEL_INT4) linear_expand_as(PANEL_INT4, panel, begin, end, to);
}

/* Adds the bias to finished chains, rounds them and stores them. */
static void linear_finish(const linear_work *work, const float *sum, size_t sum_stride,
                          int64_t first_row, int64_t num_rows, int64_t first_panel,
                          int64_t num_panels) {
    const int64_t begin = first_panel * PANEL;
    const int64_t past = (first_panel + num_panels) * PANEL;
    const int64_t count = (past < work->num_outputs ? past : work->num_outputs) - begin;
    const float *bias = work->bias ? work->bias + begin : NULL;
    for (int64_t i = 0; i < num_rows; i++) {
        const float *from = sum + (size_t)i * sum_stride;
        const size_t at = (size_t)(first_row + i) * work->y_stride + (size_t)begin;
        int64_t n = 0;
        for (; n + 8 <= count; n += 8) {
            v8 value = v8_load(from + n);
            if (bias) value = v8_add(value, v8_load(bias + n));
            if (work->is_bf16)
                v8_store_bf16((uint16_t *)work->y + at + n, value);
            else
                v8_store((float *)work->y + at + n, value);
        }
        for (; n < count; n++) {
            const float value = bias ? from[n] + bias[n] : from[n];
            if (work->is_bf16)
                ((uint16_t *)work->y)[at + (size_t)n] = narrow_bf16(value);
            else
                ((float *)work->y)[at + (size_t)n] = value;
        }
    }
}

/* All rows, no more than a tile has, on panels first .. end - 1. */
static void linear_run(const linear_work *work, int64_t first, int64_t end) {
    const int rows = (int)work->num_rows, wide = LINEAR_WIDE(work->format, rows);
    float sum[LINEAR_ROWS * LINEAR_PANELS * PANEL];
    for (int64_t at = first; at < end;) {
        const int count = end - at >= wide ? wide : 1;
        const char *panel[LINEAR_PANELS];
        for (int p = 0; p < count; p++)
            panel[p] = work->panels + (size_t)(at + p) * work->panel_bytes;
        const linear_ahead ahead = {panel[0] + LINEAR_AHEAD,
                                    (size_t)panel_chunk_bytes(work->format)};
        linear_tiles[work->format][rows - 1][count > 1](panel, work->x, work->x_stride, 0,
                                                        work->num_inputs, sum,
                                                        (size_t)count * PANEL, 1, ahead);
        linear_finish(work, sum, (size_t)count * PANEL, 0, rows, at, count);
        at += count;
    }
}

/* Rows first_row .. on panels first .. end - 1, at most LINEAR_BLOCK_ROWS and LINEAR_BLOCK_PANELS. */
static void linear_block(const linear_work *work, int64_t first_row, int64_t num_rows,
                         int64_t first, int64_t end) {
    static const size_t stride = LINEAR_BLOCK_PANELS * PANEL;
    float sum[LINEAR_BLOCK_ROWS * LINEAR_BLOCK_PANELS * PANEL];
    /* Room for a chunk that the last k does not fill. */
    float wide[(LINEAR_BLOCK_K + 4) * PANEL] __attribute__((aligned(64)));
    const float *x = work->x + (size_t)first_row * work->x_stride;
    const int num_tiles = (int)((num_rows + LINEAR_ROWS - 1) / LINEAR_ROWS);
    /* A tile of widened weights takes one k a chunk. */
    const size_t k_bytes = (size_t)(panel_chunk_bytes(work->format) / panel_chunk(work->format));
    for (int64_t begin = 0; begin < work->num_inputs; begin += LINEAR_BLOCK_K) {
        const int64_t left = work->num_inputs - begin;
        const int64_t count = left < LINEAR_BLOCK_K ? left : LINEAR_BLOCK_K;
        for (int64_t at = first; at < end; at++) {
            const char *panel = work->panels + (size_t)at * work->panel_bytes;
            const char *weights = (const char *)wide;
            if (work->format == PANEL_FP32)
                weights = panel_bits(PANEL_FP32, panel, begin);
            else
                linear_expand(work->format, panel, begin, begin + count, wide);
            /* The tiles fetch what comes next, a share each. */
            const int is_last = at + 1 == end;
            const int64_t next = is_last ? begin + count : begin;
            const char *ahead = next < work->num_inputs
                                    ? panel_bits(work->format,
                                                 is_last ? work->panels + (size_t)first * work->panel_bytes
                                                         : panel + work->panel_bytes,
                                                 next)
                                    : panel + work->panel_bytes;
            const size_t step = (k_bytes + (size_t)num_tiles - 1) / (size_t)num_tiles;
            for (int tile = 0; tile < num_tiles; tile++) {
                /* Tiles differ by one row at most: a last one of one row would waste the most. */
                const int64_t row = num_rows * tile / num_tiles;
                const int64_t rows = num_rows * (tile + 1) / num_tiles - row;
                linear_tiles[PANEL_FP32][rows - 1][0](
                    &weights, x + (size_t)row * work->x_stride + begin, work->x_stride, 0, count,
                    sum + (size_t)row * stride + (size_t)(at - first) * PANEL, stride, begin == 0,
                    (linear_ahead){ahead + (size_t)tile * step * (size_t)count, step});
            }
        }
    }
    linear_finish(work, sum, stride, first_row, num_rows, first, end - first);
}

_Static_assert(BLOCK_K == PANEL_GROUP, "int4 has one scale a group, in a block as in a panel");
/* Of a format of blocks.h: products in tiles. */
#define LINEAR_AMX 16

INLINE int linear_is_blocks(int32_t format) { return format >= BLOCK_BF16; }
INLINE int linear_block_format(int32_t format) { return format & ~LINEAR_AMX; }

/* What this CPU has for formats of blocks.h: 1 for avx512_bf16, 2 for tiles. */
int32_t linear_hardware(void) {
    return HAS_BF16 ? HAS_AMX && amx_allow() ? 3 : 1 : 0;
}

/* How a product is cut up: runs of panels, and blocks of rows outermost, so that threads that work on one share
 * its inputs. */
typedef struct {
    linear_work work;
    const uint16_t *bits; /* bf16 rows, to be widened into `wide`; or NULL */
    float *wide;
    int64_t bits_stride;
    int64_t run;
    int64_t num_runs;
    int64_t num_blocks; /* one: few rows */
} linear_job;

static void linear_widen_share(void *context, pool_share *share, int64_t item, int32_t thread) {
    const linear_job job = *(const linear_job *)context;
    const int64_t num_inputs = job.work.num_inputs;
    (void)thread;
    for (; item >= 0; item = pool_next(share)) {
        const int64_t end = linear_min((item + 1) * LINEAR_ROWS, job.work.num_rows);
        for (int64_t i = item * LINEAR_ROWS; i < end; i++)
            for (int64_t k = 0; k < num_inputs; k++)
                job.wide[i * num_inputs + k] = widen_bf16(job.bits[i * job.bits_stride + k]);
    }
}

static void linear_share(void *context, pool_share *share, int64_t item, int32_t thread) {
    const linear_job job = *(const linear_job *)context;
    const int64_t num_rows = job.work.num_rows;
    (void)thread;
    for (; item >= 0; item = pool_next(share)) {
        const int64_t block = item / job.num_runs, first = item % job.num_runs * job.run;
        const int64_t end = linear_min(first + job.run, job.work.num_panels);
        const int64_t row = num_rows * block / job.num_blocks;
        if (num_rows <= LINEAR_ROWS)
            linear_run(&job.work, first, end);
        else
            linear_block(&job.work, row, num_rows * (block + 1) / job.num_blocks - row, first, end);
    }
}

/* y (num_rows, num_outputs) = x W^T + bias.
 *
 * panels: what linear_pack made in `format`; x, y: bf16 if is_bf16, else fp32, strides in numbers; bias: fp32 or
 * NULL; wide: with bf16 rows on a format of panels.h, num_rows * num_inputs floats to work in. */
void linear_forward(const char *panels, const float *bias, const void *x, void *y, float *wide,
                    int64_t num_rows, int64_t num_inputs, int64_t num_outputs, int64_t x_stride,
                    int64_t y_stride, int32_t format, int32_t is_bf16, int32_t num_threads) {
    if (num_rows == 0) return;
#if HAS_BF16
    if (linear_is_blocks(format)) {
        const int own = linear_block_format(format);
        const bf16_work blocks = {
            .panels = panels,
            .x = x,
            .bias = bias,
            .y = y,
            .x_stride = (size_t)x_stride,
            .y_stride = (size_t)y_stride,
            .panel_bytes = block_panel_bytes(own, num_inputs),
            .num_rows = num_rows,
            .num_inputs = num_inputs,
            .num_outputs = num_outputs,
            .num_panels = (num_outputs + BLOCK_OUTPUTS - 1) / BLOCK_OUTPUTS,
            .num_blocks = block_count(num_inputs),
            .format = own,
            .is_amx = (format & LINEAR_AMX) != 0,
        };
        bf16_forward(&blocks, num_threads);
        return;
    }
#endif
    linear_work work = {
        .panels = panels,
        .x = is_bf16 ? wide : (const float *)x,
        .bias = bias,
        .y = y,
        .x_stride = (size_t)(is_bf16 ? num_inputs : x_stride),
        .y_stride = (size_t)y_stride,
        .panel_bytes = panel_bytes(format, num_inputs),
        .num_rows = num_rows,
        .num_inputs = num_inputs,
        .num_outputs = num_outputs,
        .num_panels = (num_outputs + PANEL - 1) / PANEL,
        .format = format,
        .is_bf16 = is_bf16,
    };
    const int64_t cost = num_inputs * num_outputs * num_rows;
    const int threads = (int)linear_max(1, linear_min(num_threads, cost / LINEAR_GRAIN));
    const int is_few = num_rows <= LINEAR_ROWS;
    const int64_t num_blocks =
        is_few ? 1 : (num_rows + LINEAR_BLOCK_ROWS - 1) / LINEAR_BLOCK_ROWS;
    /* Several pieces a thread: they end at different times. */
    int64_t run = work.num_panels * num_blocks / (4 * threads);
    if (is_few)
        run = linear_min(run, (int64_t)(LINEAR_RUN_BYTES / work.panel_bytes)) /
              LINEAR_PANELS * LINEAR_PANELS;
    else
        run = linear_min(run, LINEAR_BLOCK_PANELS);
    run = linear_max(run, is_few ? LINEAR_WIDE(format, num_rows) : 1);
    linear_job job = {
        .work = work,
        .bits = is_bf16 ? x : NULL,
        .wide = wide,
        .bits_stride = x_stride,
        .run = run,
        .num_runs = (work.num_panels + run - 1) / run,
        .num_blocks = num_blocks,
    };
    if (is_bf16)
        pool_run(linear_widen_share, &job, (num_rows + LINEAR_ROWS - 1) / LINEAR_ROWS, threads);
    pool_run(linear_share, &job, job.num_runs * num_blocks, threads);
}

/* Bytes that linear_pack fills. */
int64_t linear_packed_bytes(int64_t num_inputs, int64_t num_outputs, int32_t format) {
    if (linear_is_blocks(format))
        return (int64_t)block_panel_bytes(linear_block_format(format), num_inputs) *
               ((num_outputs + BLOCK_OUTPUTS - 1) / BLOCK_OUTPUTS);
    return (int64_t)panel_bytes(format, num_inputs) * ((num_outputs + PANEL - 1) / PANEL);
}

/* Lays out the weights of one panel of blocks; see linear_pack. */
static void linear_pack_blocks(int format, char *panel, int64_t first, const void *weights,
                               const float *scale, const float *offset, int64_t num_inputs,
                               int64_t num_outputs) {
    const int64_t num_blocks = block_count(num_inputs);
    for (int n = 0; n < linear_min(BLOCK_OUTPUTS, num_outputs - first); n++) {
        const int64_t output = first + n;
        if (format == BLOCK_INT8) ((float *)panel)[n] = scale[output];
        for (int64_t b = 0; b < num_blocks; b++) {
            char *block = panel + block_header(format) + (size_t)b * block_bytes(format);
            const int64_t begin = b * BLOCK_K;
            const size_t group = (size_t)(output * num_blocks + b);
            if (format == BLOCK_INT4) block_put_scale(block, n, scale[group], offset[group]);
            for (int k = 0; k < linear_min(BLOCK_K, num_inputs - begin); k++)
                block_put(format, block, n, k, weights, (size_t)(output * num_inputs + begin + k));
        }
    }
}

/* Scales (and offsets) of one k's group, or nothing. */
static void linear_pack_scales(int format, char *panel, int64_t k, int64_t group,
                               int64_t num_groups, int64_t first, int64_t num_outputs,
                               const float *scale, const float *offset) {
    for (int n = 0; n < PANEL; n++) {
        if (first + n >= num_outputs) break;
        const size_t from = (size_t)((first + n) * num_groups + group);
        if (format == PANEL_INT8) {
            ((float *)panel)[n] = scale[from];
        } else {
            uint16_t *line = (uint16_t *)(panel + (size_t)k / PANEL_GROUP * PANEL_INT4_GROUP_BYTES);
            const int place = n % LANES * 2 + n / LANES;
            line[place] = narrow_bf16(scale[from]);
            line[PANEL + place] = narrow_bf16(offset[from]);
        }
    }
}

/* Lays weights out in panels; `packed` is zero before.
 *
 * weights: (num_outputs, num_inputs) rows: fp32, bf16, int8 or (int4) uint8 below 16.
 * scale, offset: fp32 (num_outputs, groups); int8 has one group and no offset; int4 one for each PANEL_GROUP of
 * inputs, of values that bf16 holds; else NULL. */
void linear_pack(char *packed, const void *weights, const float *scale, const float *offset,
                 int64_t num_inputs, int64_t num_outputs, int32_t format, int32_t num_threads) {
    if (linear_is_blocks(format)) {
        const int own = linear_block_format(format);
        const size_t bytes = block_panel_bytes(own, num_inputs);
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1)
        for (int64_t first = 0; first < num_outputs; first += BLOCK_OUTPUTS)
            linear_pack_blocks(own, packed + (size_t)(first / BLOCK_OUTPUTS) * bytes, first, weights,
                               scale, offset, num_inputs, num_outputs);
        return;
    }
    const int64_t num_panels = (num_outputs + PANEL - 1) / PANEL;
    const int64_t num_groups =
        format == PANEL_INT4 ? (num_inputs + PANEL_GROUP - 1) / PANEL_GROUP : 1;
    const size_t bytes = panel_bytes(format, num_inputs);
    const int chunk = panel_chunk(format);
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1)
    for (int64_t p = 0; p < num_panels; p++) {
        char *panel = packed + (size_t)p * bytes;
        const int64_t first = p * PANEL;
        const int count = (int)linear_min(PANEL, num_outputs - first);
        if (scale)
            for (int64_t g = 0; g < num_groups; g++)
                linear_pack_scales(format, panel, g * PANEL_GROUP, g, num_groups, first,
                                   num_outputs, scale, offset);
        for (int64_t k = 0; k < num_inputs; k++) {
            const int at = (int)(k % chunk);
            char *bits = (char *)panel_bits(format, panel, k - at);
            for (int n = 0; n < count; n++) {
                const size_t from = (size_t)((first + n) * num_inputs + k);
                /* In narrow words: the lane, and which of what it holds. */
                const int lane = n % LANES, part = 2 * at + n / LANES;
                if (format == PANEL_FP32)
                    ((float *)bits)[n] = ((const float *)weights)[from];
                else if (format == PANEL_BF16)
                    ((uint16_t *)bits)[lane * 2 + part] = ((const uint16_t *)weights)[from];
                else if (format == PANEL_INT8)
                    bits[n] = ((const char *)weights)[from];
                else
                    ((uint32_t *)bits)[lane] |=
                        (uint32_t)((const uint8_t *)weights)[from] << (4 * part);
            }
        }
    }
}
