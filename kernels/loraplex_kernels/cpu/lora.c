/* LoRA deltas for a batch of rows with different adapters: y[row] += B (scale * (A x[row])).
 *
 * Row rule: what a row gets depends on its own x and adapter only, bit for bit. Every sum has one
 * fixed order, whatever tile it is computed in and whichever thread computes it:
 *   - shrink, h[r] = scale * <a[r], x>: 16 partial sums by k mod 16, added up in one fixed tree, then
 *     the last K mod 16 products one by one;
 *   - expand, d[n] = sum over r, in order of r; y[n] = round(y[n] + d[n]), once.
 * An embedding's x is a token id: its shrink is a row of A transposed, h = scale * a[id], no sum at all.
 * Products are fused with their additions by explicit FMA, never left to the compiler.
 *
 * Weights are bf16 or fp32 as stored, sums fp32. `a` is (rank of all slices, K), row-major; `b` of a
 * slice is in blocks of OUT_BLOCK outputs, (ceil(N / OUT_BLOCK), rank, OUT_BLOCK), zero-padded, so
 * that both are read front to back once per row tile. An embedding's `a` is (vocabulary, rank).
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#include "calls.h"
#include "simd.h"

lora_add_call lora_add;

#define MAX_SLICES 3
#define OUT_BLOCK 32
#define ROW_TILE 2

/* ------------------------------------------------------------------------------------- weights */

/* One (layer, site) of one adapter; all zero where the adapter does not touch the site. */
typedef struct {
    const void *a;
    const void *b[MAX_SLICES];
    float scale[MAX_SLICES];
    int32_t rank[MAX_SLICES];
    int32_t is_bf16;
    int32_t rank_total;
} lora_site;

/* A few rows of one group (adapter), the unit that threads take. */
typedef struct {
    int32_t group;
    int32_t begin; /* in `rows` */
    int32_t end;
} lora_task;

/* What is the same for all calls of a step. */
typedef struct lora_step {
    const lora_site *const *sites; /* by group: the adapter's table, indexed by site */
    const lora_task *tasks;
    const int32_t *rows; /* row of x and y, sorted by group */
    float *scratch;      /* num_threads * scratch_floats */
    int64_t scratch_floats;
    int32_t num_tasks;
    int32_t num_threads;
} lora_step;

/* -------------------------------------------------------------------------------------- shrink */

INLINE v8 load_weights(const void *from, size_t index, int is_bf16) {
    return is_bf16 ? v8_load_bf16((const uint16_t *)from + index)
                   : v8_load((const float *)from + index);
}

INLINE float load_weight(const void *from, size_t index, int is_bf16) {
    return is_bf16 ? widen_bf16(((const uint16_t *)from)[index]) : ((const float *)from)[index];
}

/* h[i][j] = <x[i], a[first + j]> for `rows` rows and `ranks` ranks (both compile-time constants). */
INLINE void shrink_tile(const float *const *x, const void *a, size_t first, size_t num_inputs,
                        int is_bf16, int rows, int ranks, float (*h)[4]) {
    v8 low[ROW_TILE][4], high[ROW_TILE][4];
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < ranks; j++) low[i][j] = high[i][j] = v8_zero();
    size_t k = 0;
    for (; k + 16 <= num_inputs; k += 16)
        for (int j = 0; j < ranks; j++) {
            size_t at = (first + (size_t)j) * num_inputs + k;
            v8 a_low = load_weights(a, at, is_bf16), a_high = load_weights(a, at + 8, is_bf16);
            for (int i = 0; i < rows; i++) {
                low[i][j] = v8_fma(v8_load(x[i] + k), a_low, low[i][j]);
                high[i][j] = v8_fma(v8_load(x[i] + k + 8), a_high, high[i][j]);
            }
        }
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < ranks; j++) {
            float sum = v8_total(v8_add(low[i][j], high[i][j]));
            size_t at = (first + (size_t)j) * num_inputs;
            for (size_t tail = k; tail < num_inputs; tail++)
                sum = fmaf(x[i][tail], load_weight(a, at + tail, is_bf16), sum);
            h[i][j] = sum;
        }
}

INLINE void shrink_rows(const float *const *x, const lora_site *site, size_t num_inputs,
                        int is_bf16, int rows, float *h, size_t h_stride) {
    float tile[ROW_TILE][4];
    size_t rank_total = (size_t)site->rank_total, r = 0;
    /* Four ranks at once for one row, two for two rows: eight independent sums hide FMA latency. */
    for (; rows == 1 && r + 4 <= rank_total; r += 4) {
        shrink_tile(x, site->a, r, num_inputs, is_bf16, 1, 4, tile);
        for (int j = 0; j < 4; j++) h[r + (size_t)j] = tile[0][j];
    }
    for (; rows == 2 && r + 2 <= rank_total; r += 2) {
        shrink_tile(x, site->a, r, num_inputs, is_bf16, 2, 2, tile);
        for (int i = 0; i < 2; i++)
            for (int j = 0; j < 2; j++) h[(size_t)i * h_stride + r + (size_t)j] = tile[i][j];
    }
    for (; r < rank_total; r++) {
        shrink_tile(x, site->a, r, num_inputs, is_bf16, rows, 1, tile);
        for (int i = 0; i < rows; i++) h[(size_t)i * h_stride + r] = tile[i][0];
    }
    for (int i = 0; i < rows; i++) {
        float *row = h + (size_t)i * h_stride;
        for (int s = 0; s < MAX_SLICES; s++)
            for (int32_t j = 0; j < site->rank[s]; j++) *row++ *= site->scale[s];
    }
}

/* -------------------------------------------------------------------------------------- expand */

INLINE void add_block(void *y, size_t index, size_t count, int y_is_bf16, const float *delta) {
    if (y_is_bf16) {
        uint16_t *to = (uint16_t *)y + index;
        if (count == OUT_BLOCK)
            for (int n = 0; n < OUT_BLOCK; n++) to[n] = narrow_bf16(widen_bf16(to[n]) + delta[n]);
        else
            for (size_t n = 0; n < count; n++) to[n] = narrow_bf16(widen_bf16(to[n]) + delta[n]);
    } else {
        float *to = (float *)y + index;
        if (count == OUT_BLOCK)
            for (int n = 0; n < OUT_BLOCK; n++) to[n] += delta[n];
        else
            for (size_t n = 0; n < count; n++) to[n] += delta[n];
    }
}

INLINE void expand_rows(void *y, const size_t *y_index, int y_is_bf16, const void *b, size_t rank,
                        size_t num_outputs, int is_bf16, int rows, const float *h,
                        size_t h_stride) {
    for (size_t n = 0; n < num_outputs; n += OUT_BLOCK) {
        v8 sum[ROW_TILE][OUT_BLOCK / 8];
        for (int i = 0; i < rows; i++)
            for (int v = 0; v < OUT_BLOCK / 8; v++) sum[i][v] = v8_zero();
        size_t block = n * rank;
        for (size_t r = 0; r < rank; r++) {
            v8 h_r[ROW_TILE];
            for (int i = 0; i < rows; i++) h_r[i] = v8_all(h[(size_t)i * h_stride + r]);
            for (int v = 0; v < OUT_BLOCK / 8; v++) {
                v8 b_v = load_weights(b, block + r * OUT_BLOCK + (size_t)v * 8, is_bf16);
                for (int i = 0; i < rows; i++) sum[i][v] = v8_fma(h_r[i], b_v, sum[i][v]);
            }
        }
        size_t count = num_outputs - n < OUT_BLOCK ? num_outputs - n : OUT_BLOCK;
        for (int i = 0; i < rows; i++) {
            float delta[OUT_BLOCK];
            for (int v = 0; v < OUT_BLOCK / 8; v++) v8_store(delta + v * 8, sum[i][v]);
            add_block(y, y_index[i] + n, count, y_is_bf16, delta);
        }
    }
}

/* -------------------------------------------------------------------------------------- driver */

INLINE void add_rows(void *y, const void *x, int x_is_bf16, size_t num_inputs, size_t num_outputs,
                     const int32_t *slice_begin, const lora_site *site, int is_bf16,
                     const int32_t *rows, int num_rows, float *scratch) {
    const float *x_rows[ROW_TILE];
    float *h = scratch + (size_t)num_rows * num_inputs;
    size_t h_stride = (size_t)site->rank_total;
    for (int i = 0; i < num_rows; i++) {
        size_t from = (size_t)rows[i] * num_inputs;
        if (x_is_bf16) {
            float *wide = scratch + (size_t)i * num_inputs;
            const uint16_t *bits = (const uint16_t *)x + from;
            for (size_t k = 0; k < num_inputs; k++) wide[k] = widen_bf16(bits[k]);
            x_rows[i] = wide;
        } else {
            x_rows[i] = (const float *)x + from;
        }
    }
    shrink_rows(x_rows, site, num_inputs, is_bf16, num_rows, h, h_stride);
    for (int s = 0; s < MAX_SLICES; s++) {
        size_t rank = (size_t)site->rank[s];
        if (rank == 0) continue;
        size_t y_index[ROW_TILE];
        for (int i = 0; i < num_rows; i++)
            y_index[i] = (size_t)rows[i] * num_outputs + (size_t)slice_begin[s];
        expand_rows(y, y_index, x_is_bf16, site->b[s], rank,
                    (size_t)(slice_begin[s + 1] - slice_begin[s]), is_bf16, num_rows, h, h_stride);
        h += rank;
    }
}

static void run_task(void *y, const void *x, int x_is_bf16, size_t num_inputs, size_t num_outputs,
                     const int32_t *slice_begin, const lora_site *site, const int32_t *rows,
                     int32_t num_rows, float *scratch) {
    for (int32_t i = 0; i < num_rows;) {
        int pair = num_rows - i >= 2;
        if (site->is_bf16 && pair)
            add_rows(y, x, x_is_bf16, num_inputs, num_outputs, slice_begin, site, 1, rows + i, 2,
                     scratch);
        else if (site->is_bf16)
            add_rows(y, x, x_is_bf16, num_inputs, num_outputs, slice_begin, site, 1, rows + i, 1,
                     scratch);
        else if (pair)
            add_rows(y, x, x_is_bf16, num_inputs, num_outputs, slice_begin, site, 0, rows + i, 2,
                     scratch);
        else
            add_rows(y, x, x_is_bf16, num_inputs, num_outputs, slice_begin, site, 0, rows + i, 1,
                     scratch);
        i += pair ? 2 : 1;
    }
}

INLINE int thread_index(void) {
#ifdef _OPENMP
    return omp_get_thread_num();
#else
    return 0;
#endif
}

/* Add the deltas of one site to y, in place. x and y are (rows, num_inputs) and (rows, num_outputs),
 * contiguous, both bf16 or both fp32. slice_begin has MAX_SLICES + 1 offsets into a row of y. */
void lora_add(void *y, const void *x, int32_t x_is_bf16, int32_t num_inputs, int32_t num_outputs,
              const int32_t *slice_begin, int32_t site_index, const lora_step *step) {
    #pragma omp parallel for schedule(dynamic, 1) num_threads(step->num_threads) \
        if (step->num_tasks > 1 && step->num_threads > 1)
    for (int32_t t = 0; t < step->num_tasks; t++) {
        const lora_task *task = step->tasks + t;
        const lora_site *site = step->sites[task->group] + site_index;
        if (site->rank_total == 0) continue;
        float *scratch = step->scratch + (size_t)thread_index() * (size_t)step->scratch_floats;
        run_task(y, x, x_is_bf16, (size_t)num_inputs, (size_t)num_outputs, slice_begin, site,
                 step->rows + task->begin, task->end - task->begin, scratch);
    }
}

INLINE void embed_rows(void *y, const int64_t *token_ids, int y_is_bf16, size_t num_outputs,
                       const lora_site *site, int is_bf16, const int32_t *rows, int num_rows,
                       float *h) {
    size_t rank = (size_t)site->rank[0], y_index[ROW_TILE];
    for (int i = 0; i < num_rows; i++) {
        size_t from = (size_t)token_ids[rows[i]] * rank;
        for (size_t r = 0; r < rank; r++)
            h[(size_t)i * rank + r] = site->scale[0] * load_weight(site->a, from + r, is_bf16);
        y_index[i] = (size_t)rows[i] * num_outputs;
    }
    expand_rows(y, y_index, y_is_bf16, site->b[0], rank, num_outputs, is_bf16, num_rows, h, rank);
}

static void run_embed_task(void *y, const int64_t *token_ids, int y_is_bf16, size_t num_outputs,
                           const lora_site *site, const int32_t *rows, int32_t num_rows,
                           float *scratch) {
    for (int32_t i = 0; i < num_rows;) {
        int pair = num_rows - i >= 2;
        if (site->is_bf16 && pair)
            embed_rows(y, token_ids, y_is_bf16, num_outputs, site, 1, rows + i, 2, scratch);
        else if (site->is_bf16)
            embed_rows(y, token_ids, y_is_bf16, num_outputs, site, 1, rows + i, 1, scratch);
        else if (pair)
            embed_rows(y, token_ids, y_is_bf16, num_outputs, site, 0, rows + i, 2, scratch);
        else
            embed_rows(y, token_ids, y_is_bf16, num_outputs, site, 0, rows + i, 1, scratch);
        i += pair ? 2 : 1;
    }
}

/* Add the deltas of the embedding to y (rows, num_outputs), in place; token_ids has an id per row. */
void lora_embed(void *y, const int64_t *token_ids, int32_t y_is_bf16, int32_t num_outputs,
                int32_t site_index, const lora_step *step) {
    #pragma omp parallel for schedule(dynamic, 1) num_threads(step->num_threads) \
        if (step->num_tasks > 1 && step->num_threads > 1)
    for (int32_t t = 0; t < step->num_tasks; t++) {
        const lora_task *task = step->tasks + t;
        const lora_site *site = step->sites[task->group] + site_index;
        if (site->rank_total == 0) continue;
        float *scratch = step->scratch + (size_t)thread_index() * (size_t)step->scratch_floats;
        run_embed_task(y, token_ids, y_is_bf16, (size_t)num_outputs, site, step->rows + task->begin,
                       task->end - task->begin, scratch);
    }
}
