/* Paged attention: softmax(q K^T * scale) V over the positions 0 .. own of a row's own sequence.
 *
 * Row rule: a row's result depends on its own query, position and keys only, bit for bit. Keys are
 * taken in tiles of KEY_TILE, aligned to absolute positions, with an online softmax; within a tile
 * every sum has one fixed order, whatever rows share the tile and whichever thread computes it. So a
 * row gets the same bits alone, batched, in any chunk of a prefill and wherever its blocks lie.
 *
 * Nothing past a task's last query is read. Scores of keys between a row's own position and that
 * query are computed and then selected away, never multiplied with zero, and their values are not
 * read, so that NaN in unwritten, foreign or later slots cannot reach a row.
 *
 * Layout of a token's slot: keys of all kv heads, then values, (2, num_kv_heads, head_dim), bf16 or
 * fp32. Accumulation is fp32; the output is rounded once.
 * Source: online softmax, arXiv 1805.02867; tiling as in FlashAttention, arXiv 2205.14135.
 */
#include <float.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#include "simd.h"

#define KEY_TILE 32
#define QUERY_TILE 8
#define MAX_FOLD 16
#define MAX_HEAD_DIM 256
#define MAX_ROWS (QUERY_TILE * MAX_FOLD)

typedef struct {
    int32_t num_heads;
    int32_t num_kv_heads;
    int32_t head_dim; /* a multiple of 8, at most MAX_HEAD_DIM */
    int32_t block_size;
    int32_t is_bf16;
    float scale;
} attention_shape;

/* Up to QUERY_TILE consecutive queries of one sequence, the unit that threads take. */
typedef struct {
    int32_t first_row; /* of q and out */
    int32_t count;
    int32_t position; /* of the first query */
    int32_t sequence; /* row of the block table */
} attention_task;

/* A thread's memory for one task and kv head. */
typedef struct {
    float query[MAX_ROWS][MAX_HEAD_DIM];
    float sum[MAX_ROWS][MAX_HEAD_DIM];
    float max[MAX_ROWS];
    float weight[MAX_ROWS];
    float key[KEY_TILE][MAX_HEAD_DIM];   /* bf16 caches only: the tile widened */
    float value[KEY_TILE][MAX_HEAD_DIM];
} attention_scratch;

size_t attention_scratch_bytes(void) { return sizeof(attention_scratch); }

INLINE void widen(float *to, const uint16_t *from, int count) {
    for (int d = 0; d < count; d += 8) v8_store(to + d, v8_load_bf16(from + d));
}

/* The eight dot products <q, key[j]>, each summed over d mod 8 in order of d, then in one tree. */
INLINE v8 dot8(const float *q, const float *const *key, int head_dim) {
    v8 part[8];
    for (int j = 0; j < 8; j++) part[j] = v8_zero();
    for (int d = 0; d < head_dim; d += 8) {
        v8 q_part = v8_load(q + d);
        for (int j = 0; j < 8; j++) part[j] = v8_fma(q_part, v8_load(key[j] + d), part[j]);
    }
    return v8_sum_each(part);
}

/* One row against the first `visible` keys of a tile (1 .. KEY_TILE). */
INLINE void attend_tile(const float *q, float *sum, float *row_max, float *row_weight,
                        const float *const *key, const float *const *value, int visible,
                        int head_dim, float scale) {
    float score[KEY_TILE];
    const v8 scale8 = v8_all(scale), lowest = v8_all(-INFINITY);
    v8 top = lowest;
    for (int j = 0; j < KEY_TILE; j += 8) {
        v8 s = lowest;
        if (j < visible) {
            s = v8_mul(dot8(q, key + j, head_dim), scale8);
            s = v8_first(s, lowest, visible - j);
        }
        top = v8_max(top, s);
        v8_store(score + j, s);
    }
    const float old_max = *row_max;
    const float new_max = fmaxf(old_max, v8_top(top));
    /* The first tile has nothing to rescale; exp(-inf - x) is 0 by selection, not by arithmetic. */
    const float rescale = old_max == -INFINITY ? 0.0f : v8_exp_one(old_max - new_max);
    const v8 max8 = v8_all(new_max);
    v8 weight = v8_zero();
    for (int j = 0; j < KEY_TILE; j += 8) {
        v8 p = v8_zero();
        if (j < visible)
            p = v8_first(v8_exp(v8_sub(v8_load(score + j), max8)), v8_zero(), visible - j);
        weight = v8_add(weight, p);
        v8_store(score + j, p);
    }
    *row_max = new_max;
    *row_weight = fmaf(*row_weight, rescale, v8_total(weight));
    const v8 rescale8 = v8_all(rescale);
    for (int d = 0; d < head_dim; d += 32) {
        const int width = head_dim - d < 32 ? (head_dim - d) / 8 : 4;
        v8 acc[4];
        for (int i = 0; i < width; i++) acc[i] = v8_mul(v8_load(sum + d + 8 * i), rescale8);
        for (int j = 0; j < visible; j++) {
            const v8 p = v8_all(score[j]);
            for (int i = 0; i < width; i++)
                acc[i] = v8_fma(p, v8_load(value[j] + d + 8 * i), acc[i]);
        }
        for (int i = 0; i < width; i++) v8_store(sum + d + 8 * i, acc[i]);
    }
}

static void attend(const attention_shape *shape, const attention_task *task, int kv_head,
                   const void *q, void *out, const void *kv, const int32_t *table,
                   attention_scratch *scratch) {
    const int head_dim = shape->head_dim, fold = shape->num_heads / shape->num_kv_heads;
    const size_t row_width = (size_t)shape->num_heads * (size_t)head_dim;
    const size_t kv_width = (size_t)shape->num_kv_heads * (size_t)head_dim;
    const int num_rows = task->count * fold;
    const int end = task->position + task->count; /* keys that the last query sees */

    for (int r = 0; r < num_rows; r++) {
        const size_t at = ((size_t)task->first_row + (size_t)(r / fold)) * row_width +
                          ((size_t)kv_head * (size_t)fold + (size_t)(r % fold)) * (size_t)head_dim;
        if (shape->is_bf16)
            widen(scratch->query[r], (const uint16_t *)q + at, head_dim);
        else
            memcpy(scratch->query[r], (const float *)q + at, sizeof(float) * (size_t)head_dim);
        memset(scratch->sum[r], 0, sizeof(float) * (size_t)head_dim);
        scratch->max[r] = -INFINITY;
        scratch->weight[r] = 0.0f;
    }

    for (int tile = 0; tile < end; tile += KEY_TILE) {
        const int present = end - tile < KEY_TILE ? end - tile : KEY_TILE;
        const float *key[KEY_TILE], *value[KEY_TILE];
        for (int j = 0; j < present; j++) {
            const int position = tile + j;
            const size_t slot = (size_t)table[position / shape->block_size] *
                                    (size_t)shape->block_size +
                                (size_t)(position % shape->block_size);
            const size_t at = slot * 2 * kv_width + (size_t)kv_head * (size_t)head_dim;
            if (shape->is_bf16) {
                widen(scratch->key[j], (const uint16_t *)kv + at, head_dim);
                widen(scratch->value[j], (const uint16_t *)kv + at + kv_width, head_dim);
                key[j] = scratch->key[j];
                value[j] = scratch->value[j];
            } else {
                key[j] = (const float *)kv + at;
                value[j] = (const float *)kv + at + kv_width;
            }
        }
        /* dot8 takes eight pointers: those past the end repeat a key that is there. */
        for (int j = present; j < KEY_TILE; j++) key[j] = key[0];

        for (int r = 0; r < num_rows; r++) {
            const int own_end = task->position + r / fold + 1;
            if (own_end <= tile) continue;
            const int visible = own_end - tile < KEY_TILE ? own_end - tile : KEY_TILE;
            attend_tile(scratch->query[r], scratch->sum[r], &scratch->max[r], &scratch->weight[r],
                        key, value, visible, head_dim, shape->scale);
        }
    }

    for (int r = 0; r < num_rows; r++) {
        const size_t at = ((size_t)task->first_row + (size_t)(r / fold)) * row_width +
                          ((size_t)kv_head * (size_t)fold + (size_t)(r % fold)) * (size_t)head_dim;
        const float weight = scratch->weight[r];
        for (int d = 0; d < head_dim; d++) {
            const float mean = scratch->sum[r][d] / weight;
            if (shape->is_bf16)
                ((uint16_t *)out)[at + (size_t)d] = narrow_bf16(mean);
            else
                ((float *)out)[at + (size_t)d] = mean;
        }
    }
}

/* q and out: (rows, num_heads * head_dim); kv: one layer's slots; table: (sequences, table_width);
 * scratch: num_threads * attention_scratch_bytes(). Rows that no task names are not written. */
void attention_forward(const attention_shape *shape, const attention_task *tasks, int32_t num_tasks,
                       const void *q, void *out, const void *kv, const int32_t *table,
                       int32_t table_width, void *scratch, int32_t num_threads) {
    const int32_t num_items = num_tasks * shape->num_kv_heads;
#pragma omp parallel for schedule(dynamic) num_threads(num_threads) if (num_items > 1)
    for (int32_t item = 0; item < num_items; item++) {
        const attention_task *task = tasks + item / shape->num_kv_heads;
#ifdef _OPENMP
        attention_scratch *own = (attention_scratch *)scratch + omp_get_thread_num();
#else
        attention_scratch *own = (attention_scratch *)scratch;
#endif
        attend(shape, task, item % shape->num_kv_heads, q, out, kv,
               table + (size_t)task->sequence * (size_t)table_width, own);
    }
}
