/* Paged attention: softmax(q K^T * scale) V over the positions that a row sees of its own sequence.
 *
 * Row rule: a row's result depends on its own query, position and keys only, bit for bit. Keys are taken
 * in tiles of ATTENTION_TILE, aligned to absolute positions. A tile by itself gives a row the maximum of
 * its scores, the sum of its weights and the weighted sum of its values, all in one fixed order; the tiles
 * of a row are then joined one after the other in order of position. So it does not matter which rows share a tile,
 * which thread computes it, or whether one item computes all tiles of a row or several items do and leave
 * them in `partials` to be joined. A row gets the same bits alone, batched, in any chunk of a
 * prefill, with any number of threads and wherever its blocks lie.
 *
 * No slot is read that no row of an item sees. Scores of keys that one of its rows does not see are
 * computed and then selected away, never multiplied with zero, and their values are not read for that
 * row, so that NaN in unwritten, foreign or later slots cannot reach it.
 *
 * bf16 is computed in tiles in hardware where the CPU has them (attention_amx.h), with bits of their own and
 * therefore for every number of rows. There a value that a row does not see is multiplied with a weight of zero,
 * which changes nothing, but only if it is finite; else zeros stand in its place for that row.
 *
 * Layout of a token's slot: keys of all kv heads, then values, (2, num_kv_heads, head_dim), bf16 or
 * fp32. Accumulation is fp32; the output is rounded once.
 * Source: online softmax, arXiv 1805.02867; tiling as in FlashAttention, arXiv 2205.14135; joining of
 * splits as in Flash-Decoding.
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "attention_amx.h"
#include "calls.h"
#include "pool.h"
#include "simd.h"
#include "tiles.h"
#include "v16.h"

attention_forward_call attention_forward;

#define ATTENTION_TILE 64
#define ATTENTION_LINE 16 /* floats: the scratch's arrays begin on lines of their own */

typedef struct {
    int32_t num_heads;
    int32_t num_kv_heads;
    int32_t head_dim; /* a multiple of 8 */
    int32_t block_size;
    int32_t is_bf16;
    int32_t window;   /* keys that a row sees, its own counted; 0: all */
    int32_t max_rows; /* query heads of an item, over its queries and kv heads */
    int32_t in_tiles; /* bf16 by attention_amx.h; only where attention_may_use_tiles() */
    float scale;
    float soft_cap; /* scores become soft_cap * tanh(score / soft_cap); 0: as they are */
} attention_shape;

/* Consecutive queries of one sequence against some kv heads and some tiles: the unit that threads take. */
typedef struct attention_item {
    int32_t first_row; /* of q and out */
    int32_t count;
    int32_t position; /* of the first query */
    int32_t sequence; /* row of the block table */
    int32_t first_head;
    int32_t num_heads; /* kv heads */
    int32_t first_tile;
    int32_t end_tile;
    int64_t partial; /* where in `partials` its first tile goes; -1: all tiles of its rows are here */
} attention_item;

/* All that is the same for the items of a call. */
typedef struct attention_call {
    const attention_shape *shape;
    const void *q;
    void *out;
    const void *kv;
    const int32_t *table;
    float *partials;
    int64_t q_stride; /* elements from one row to the next */
    int64_t out_stride;
    int32_t table_width;
} attention_call;

/* A thread's memory: rows of an item, a kv head's after another's, query by query. */
typedef struct {
    float *query;      /* (max_rows, head_dim), scaled */
    float *sum;        /* (max_rows, head_dim): the tiles joined so far */
    float *part;       /* (max_rows, head_dim): of a tile, where its rows see different keys */
    float *score;      /* (max_rows, ATTENTION_TILE): scores, then weights */
    float *max;        /* (max_rows): of the tiles joined so far; log2 */
    float *weight;     /* (max_rows) */
    float *tile_max;   /* (max_rows) */
    float *tile_weight;
    float *keep;       /* (max_rows): factor of what was joined so far */
    float *take;       /* (max_rows): factor of the tile */
    float *wide;       /* (ATTENTION_TILE, head_dim): a bf16 tile widened, where many rows share it */
} attention_scratch;

/* A thread's memory where it computes in tiles in hardware. A kv head's rows begin with a tile of their own. */
typedef struct {
    uint16_t *query;   /* (tile rows, width), as it is; width: head_dim in whole tiles. Packed, where a kv head's rows
                        * are one tile */
    float *sum;        /* (tile rows, width): the tiles of keys joined so far */
    float *max;        /* (tile rows): of those; log2 */
    float *weight;     /* (tile rows) */
    uint16_t *keys;    /* a kv head's of one tile, packed: see attention_amx.h; or some as they are */
    uint16_t *values;
    uint16_t *blank;   /* (width): zeros, for keys that are not there */
    uint16_t *rounded; /* (AMX_ROWS, ATTENTION_TILE): weights */
    float *score;      /* (AMX_ROWS, ATTENTION_TILE) */
    float *part;       /* (AMX_ROWS, width): weighted values, where the scores were */
    float *turned;     /* (AMX_ROWS keys, AMX_ROWS) */
} attention_tile_scratch;

INLINE size_t attention_lines(size_t floats) {
    return (floats + ATTENTION_LINE - 1) / ATTENTION_LINE * ATTENTION_LINE;
}

/* Floats of a row's sum of values. */
INLINE size_t attention_sum_width(const attention_shape *shape) {
#if ATTENTION_HAS_AMX
    if (shape->in_tiles) return pack_width(shape->head_dim);
#endif
    return (size_t)shape->head_dim;
}

/* Lays out a thread's memory at `base`, if any; returns its floats. */
static size_t attention_layout(const attention_shape *shape, float *base, attention_scratch *to) {
    const size_t rows = attention_lines((size_t)shape->max_rows), width = (size_t)shape->head_dim;
    const size_t sizes[] = {rows * width, rows * width, rows * width, rows * ATTENTION_TILE,
                            rows, rows, rows, rows, rows, rows, ATTENTION_TILE * width};
    float **const parts[] = {&to->query, &to->sum, &to->part, &to->score, &to->max, &to->weight,
                             &to->tile_max, &to->tile_weight, &to->keep, &to->take, &to->wide};
    size_t used = 0;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        if (base) *parts[i] = base + used;
        used += attention_lines(sizes[i]);
    }
    return used;
}

static size_t attention_tile_layout(const attention_shape *shape, float *base,
                                    attention_tile_scratch *to) {
    const size_t width = attention_sum_width(shape);
    const size_t heads = (size_t)shape->num_kv_heads;
    const size_t rows = ((size_t)shape->max_rows + heads * (AMX_ROWS - 1) + AMX_ROWS - 1) / AMX_ROWS * AMX_ROWS;
    const size_t scores = AMX_ROWS * ATTENTION_TILE, parts_width = AMX_ROWS * width;
    const size_t sizes[] = {rows * width, ATTENTION_TILE * width, ATTENTION_TILE * width, width, scores};
    uint16_t **const parts[] = {&to->query, &to->keys, &to->values, &to->blank, &to->rounded};
    const size_t float_sizes[] = {rows * width, rows, rows, scores > parts_width ? scores : parts_width,
                                  AMX_ROWS * AMX_ROWS};
    float **const float_parts[] = {&to->sum, &to->max, &to->weight, &to->score, &to->turned};
    size_t used = 0;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        if (base) *parts[i] = (uint16_t *)(base + used);
        used += attention_lines(sizes[i] / 2);
    }
    for (size_t i = 0; i < sizeof float_sizes / sizeof *float_sizes; i++) {
        if (base) *float_parts[i] = base + used;
        used += attention_lines(float_sizes[i]);
    }
    if (base) to->part = to->score;
    return used;
}

size_t attention_scratch_floats(const attention_shape *shape) {
    attention_scratch unused;
    attention_tile_scratch unused_too;
    return shape->in_tiles ? attention_tile_layout(shape, NULL, &unused_too)
                           : attention_layout(shape, NULL, &unused);
}

/* Whether this build has tiles in hardware, and the system grants them to the process. */
int32_t attention_may_use_tiles(void) { return ATTENTION_HAS_AMX && amx_allow(); }

/* Floats that a (tile, kv head, row) takes in `partials`: the sum, the maximum, the weight. */
INLINE size_t attention_partial_floats(const attention_shape *shape) {
    return attention_sum_width(shape) + 8;
}

/* The keys of a tile that a query sees: [first, end) within the tile; none where first >= end. */
typedef struct {
    int first;
    int end;
} attention_span;

INLINE attention_span attention_sees(const attention_shape *shape, int own, int tile_start) {
    attention_span span = {0, own + 1 - tile_start};
    if (shape->window > 0) span.first = own + 1 - shape->window - tile_start;
    if (span.first < 0) span.first = 0;
    if (span.end > ATTENTION_TILE) span.end = ATTENTION_TILE;
    return span;
}

/* A bit for each of its keys. */
INLINE uint64_t attention_span_bits(attention_span span) {
    if (span.first >= span.end) return 0;
    return (~(uint64_t)0 >> (64 - (span.end - span.first))) << span.first;
}

/* The tile that a query's joining begins with. */
INLINE int attention_first_tile(const attention_shape *shape, int own) {
    const int first = shape->window > 0 ? own + 1 - shape->window : 0;
    return first > 0 ? first / ATTENTION_TILE : 0;
}

/* ------------------------------------------------------------------------------- parts of a tile */

/* Where the slots of keys [first, end) of a tile lie, as elements of kv; the rest repeats one of them. */
static void attention_find_slots(const attention_shape *shape, const int32_t *table, int tile_start,
                                 int first, int end, size_t *slot) {
    const size_t slot_width = 2 * (size_t)shape->num_kv_heads * (size_t)shape->head_dim;
    int at = first;
    while (at < end) {
        const int block = (tile_start + at) / shape->block_size;
        const int within = (tile_start + at) % shape->block_size;
        const size_t base = (size_t)table[block] * (size_t)shape->block_size;
        for (int i = within; i < shape->block_size && at < end; i++, at++)
            slot[at] = (base + (size_t)i) * slot_width;
    }
    for (int j = 0; j < first; j++) slot[j] = slot[first];
    for (int j = end; j < ATTENTION_TILE; j++) slot[j] = slot[first];
}

/* The keys that an item's rows see in `tile`, and in the one after it, whose memory is asked for meanwhile: tiles
 * take turns with the two places. */
static void attention_find_keys(const attention_call *call, const attention_item *item, int tile,
                                attention_span present[2], size_t slot[2][ATTENTION_TILE]) {
    const int32_t *table = call->table + (size_t)item->sequence * (size_t)call->table_width;
    const int last = item->position + item->count - 1;
    for (int ahead = tile > item->first_tile; ahead <= (tile + 1 < item->end_tile); ahead++) {
        const int start = (tile + ahead) * ATTENTION_TILE, to = (tile + ahead) & 1;
        present[to].first = attention_sees(call->shape, item->position, start).first;
        present[to].end = attention_sees(call->shape, last, start).end;
        attention_find_slots(call->shape, table, start, present[to].first, present[to].end, slot[to]);
    }
}

INLINE void attention_fetch(const void *kv, size_t element, size_t count, size_t element_bytes) {
    const char *from = (const char *)kv + element * element_bytes;
    for (size_t byte = 0; byte < count * element_bytes; byte += 64) __builtin_prefetch(from + byte, 0, 2);
}

/* A row's scores, as products, become capped ones in log2. */
INLINE void attention_cap(const attention_shape *shape, attention_span span, float *score) {
    const v8 scale = v8_all(shape->scale / shape->soft_cap);
    const v8 cap = v8_all(shape->soft_cap * 1.44269504088896341f);
    for (int j = span.first & ~7; j < span.end; j += 8)
        v8_store(score + j, v8_mul(cap, v8_tanh(v8_mul(scale, v8_load(score + j)))));
}

/* One row's scores of a tile become weights, 2^(score - maximum); zero outside its span. */
INLINE void attention_soften(const attention_shape *shape, attention_span span, float *score,
                             float *max, float *weight) {
    const v8 lowest = v8_all(-INFINITY), zero = v8_zero();
    const v8 cap = v8_all(shape->soft_cap * 1.44269504088896341f);
    const int begin = span.first & ~7;
    v8 top = lowest;
    for (int j = begin; j < span.end; j += 8) {
        v8 s = v8_load(score + j);
        if (shape->soft_cap > 0.0f) s = v8_mul(cap, v8_tanh(s));
        if (span.end - j < 8) s = v8_first(s, lowest, span.end - j);
        if (j < span.first) s = v8_first(lowest, s, span.first - j);
        top = v8_max(top, s);
        v8_store(score + j, s);
    }
    const float largest = v8_largest(top);
    v8 total = zero;
#if HAS_V16
    for (int j = span.first & ~15; j < span.end; j += 16) {
        const __mmask16 sees = (__mmask16)(attention_span_bits(span) >> j);
        const v16 p = _mm512_maskz_mov_ps(sees, v16_exp2(v16_sub(v16_load(score + j), v16_all(largest))));
        total = v8_add(v8_add(total, v16_low(p)), v16_high(p));
        v16_store(score + j, p);
    }
#else
    const v8 max8 = v8_all(largest);
    for (int j = begin; j < span.end; j += 8) {
        v8 p = v8_exp2(v8_sub(v8_load(score + j), max8));
        if (span.end - j < 8) p = v8_first(p, zero, span.end - j);
        if (j < span.first) p = v8_first(zero, p, span.first - j);
        total = v8_add(total, p);
        v8_store(score + j, p);
    }
#endif
    *max = largest;
    *weight = v8_total(total);
}

/* For eight rows: how the joined sums and a tile's are brought to one maximum. */
INLINE void attention_join_weights(float *max, float *weight, const float *tile_max,
                                   const float *tile_weight, float *keep, float *take) {
    const v8 old = v8_load(max), new = v8_load(tile_max);
    const v8 top = v8_max(old, new);
    const v8 keep8 = v8_exp2(v8_sub(old, top)), take8 = v8_exp2(v8_sub(new, top));
    const v8 kept = v8_mul(v8_load(weight), keep8);
    v8_store(max, top);
    v8_store(weight, v8_fma(v8_load(tile_weight), take8, kept));
    v8_store(keep, keep8);
    v8_store(take, take8);
}

INLINE v8 attention_join(v8 joined, v8 tile, v8 keep, v8 take) {
    return v8_fma(tile, take, v8_mul(joined, keep));
}

/* What becomes of a tile's weighted values. */
typedef struct {
    float *sum;        /* of the first row; row_stride floats from one to the next */
    float *part;
    const float *keep; /* by row; NULL: there is nothing to join with */
    const float *take;
    size_t row_stride;
    size_t part_stride;
} attention_target;

/* Weighted values of keys [first, end), `width` vectors of them from element d on, for a few rows. They
 * begin with `part`, unless this is the rows' first, and end in it, unless it is their last: then
 * they are joined to `sum`. */
INLINE void attention_weigh(const float *weight, const void *const *value, int is_bf16, int first,
                            int end, int rows, size_t d, int width, int is_first, int is_last,
                            const attention_target *to) {
    const size_t bytes = d * (is_bf16 ? sizeof(uint16_t) : sizeof(float));
    const size_t part_stride = to->part_stride, row_stride = to->row_stride;
    const float *keep = to->keep, *take = to->take;
    float *part = to->part + d, *joined = to->sum + d;
#if HAS_V16
    if (width == TILE_COLS) {
        v16 wide[TILE_ROWS][TILE_COLS / 2];
        for (int i = 0; i < rows; i++)
            for (int v = 0; v < width / 2; v++)
                wide[i][v] = is_first ? v16_zero() : v16_load(part + (size_t)i * part_stride + 16 * v);
        for (int j = first; j < end; j++) {
            const void *from = (const char *)value[j] + bytes;
            v16 scale[TILE_ROWS];
            for (int i = 0; i < rows; i++) scale[i] = v16_all(weight[i * ATTENTION_TILE + j]);
            for (int v = 0; v < width / 2; v++) {
                const v16 x = v16_hold(is_bf16 ? v16_load_bf16((const uint16_t *)from + 16 * v)
                                               : v16_load((const float *)from + 16 * v));
                for (int i = 0; i < rows; i++) wide[i][v] = v16_fma(scale[i], x, wide[i][v]);
            }
        }
        for (int i = 0; i < rows; i++)
            for (int v = 0; v < width / 2; v++) {
                float *at = joined + (size_t)i * row_stride + 16 * v;
                if (!is_last)
                    v16_store(part + (size_t)i * part_stride + 16 * v, wide[i][v]);
                else if (keep)
                    v16_store(at, v16_fma(wide[i][v], v16_all(take[i]),
                                          v16_mul(v16_load(at), v16_all(keep[i]))));
                else
                    v16_store(at, wide[i][v]);
            }
        return;
    }
#endif
    v8 sum[TILE_ROWS][TILE_COLS];
    if (is_first) {
        for (int i = 0; i < rows; i++)
            for (int v = 0; v < width; v++) sum[i][v] = v8_zero();
    } else {
        for (int i = 0; i < rows; i++)
            for (int v = 0; v < width; v++) sum[i][v] = v8_load(part + (size_t)i * part_stride + 8 * v);
    }
    for (int j = first; j < end; j++)
        tile_weigh(sum, weight + j, ATTENTION_TILE, (const char *)value[j] + bytes, is_bf16, rows,
                   width);
    if (!is_last) {
        for (int i = 0; i < rows; i++)
            for (int v = 0; v < width; v++) v8_store(part + (size_t)i * part_stride + 8 * v, sum[i][v]);
    } else if (keep) {
        for (int i = 0; i < rows; i++) {
            const v8 keep8 = v8_all(keep[i]), take8 = v8_all(take[i]);
            for (int v = 0; v < width; v++) {
                float *at = joined + (size_t)i * row_stride + 8 * v;
                v8_store(at, attention_join(v8_load(at), sum[i][v], keep8, take8));
            }
        }
    } else {
        for (int i = 0; i < rows; i++)
            for (int v = 0; v < width; v++) v8_store(joined + (size_t)i * row_stride + 8 * v, sum[i][v]);
    }
}

#define ATTENTION_WEIGH(rows, width, suffix, is_bf16)                                              \
    APART void attention_weigh_##rows##x##width##suffix(                                           \
        const float *weight, const void *const *value, attention_span keys, size_t d, int is_first, \
        int is_last, const attention_target *to) {                                                 \
        attention_weigh(weight, value, is_bf16, keys.first, keys.end, rows, d, width, is_first,    \
                        is_last, to);                                                              \
    }
#define ATTENTION_WEIGH_ALL(suffix, is_bf16)                                                       \
    ATTENTION_WEIGH(1, 1, suffix, is_bf16)                                                         \
    ATTENTION_WEIGH(2, 1, suffix, is_bf16)                                                         \
    ATTENTION_WEIGH(3, 1, suffix, is_bf16)                                                         \
    ATTENTION_WEIGH(1, 2, suffix, is_bf16)                                                         \
    ATTENTION_WEIGH(2, 2, suffix, is_bf16)                                                         \
    ATTENTION_WEIGH(3, 2, suffix, is_bf16)                                                         \
    ATTENTION_WEIGH(1, 4, suffix, is_bf16)                                                         \
    ATTENTION_WEIGH(2, 4, suffix, is_bf16)                                                         \
    ATTENTION_WEIGH(3, 4, suffix, is_bf16)
ATTENTION_WEIGH_ALL(fp32, 0)
ATTENTION_WEIGH_ALL(bf16, 1)

INLINE void attention_weigh_rows(const float *weight, const void *const *value, int is_bf16,
                                 attention_span keys, int rows, size_t d, int width, int is_first,
                                 int is_last, const attention_target *to) {
    typedef void weigh(const float *, const void *const *, attention_span, size_t, int, int,
                       const attention_target *);
#define ROWS_OF(width, suffix)                                                  \
    {attention_weigh_1x##width##suffix, attention_weigh_2x##width##suffix,      \
     attention_weigh_3x##width##suffix}
    static weigh *const by[2][3][TILE_ROWS] = {
        {ROWS_OF(1, fp32), ROWS_OF(2, fp32), ROWS_OF(4, fp32)},
        {ROWS_OF(1, bf16), ROWS_OF(2, bf16), ROWS_OF(4, bf16)},
    };
#undef ROWS_OF
    by[is_bf16][width / 2][rows - 1](weight, value, keys, d, is_first, is_last, to);
}

INLINE attention_target attention_target_at(attention_target of, int row) {
    of.sum += (size_t)row * of.row_stride;
    of.part += (size_t)row * of.part_stride;
    if (of.keep) of.keep += row, of.take += row;
    return of;
}

/* -------------------------------------------------------------------------------------- an item */

/* An item on its way through its tiles. */
typedef struct {
    const attention_call *call;
    const attention_item *item;
    attention_scratch at;
    attention_tile_scratch tiles; /* instead, in tiles in hardware */
    int fold;          /* query heads of a kv head */
    int rows_per_head; /* of the item */
    int num_rows;
} attention_work;

/* One tile's keys of one kv head, as rows of fp32 or of bf16; bf16 is widened for many rows. */
INLINE int attention_rows_of(const attention_work *work, const size_t *slot, size_t offset,
                             attention_span present, const void **row) {
    const attention_shape *shape = work->call->shape;
    const size_t width = (size_t)shape->head_dim;
    if (!shape->is_bf16) {
        for (int j = 0; j < ATTENTION_TILE; j++) row[j] = (const float *)work->call->kv + slot[j] + offset;
        return 0;
    }
    const uint16_t *kv = (const uint16_t *)work->call->kv;
    if (work->rows_per_head <= TILE_ROWS) {
        for (int j = 0; j < ATTENTION_TILE; j++) row[j] = kv + slot[j] + offset;
        return 1;
    }
    for (int j = 0; j < ATTENTION_TILE; j++) {
        const int from = j >= present.first && j < present.end ? j : present.first;
        row[j] = work->at.wide + (size_t)from * width;
    }
    for (int j = present.first; j < present.end; j++)
        for (size_t d = 0; d < width; d += 8)
            v8_store(work->at.wide + (size_t)j * width + d, v8_load_bf16(kv + slot[j] + offset + d));
    return 0;
}

/* Scores of all rows that see something of the tile, head by head; fetches values, and the next tile's keys. */
static void attention_score_tile(const attention_work *work, int tile_start, attention_span present,
                                 const size_t *slot, const size_t *next_slot) {
    const attention_shape *shape = work->call->shape;
    const attention_item *item = work->item;
    const size_t width = (size_t)shape->head_dim, element = shape->is_bf16 ? 2 : 4;
    const size_t kv_width = (size_t)shape->num_kv_heads * width;
    const void *key[ATTENTION_TILE];
    for (int h = 0; h < item->num_heads; h++) {
        const size_t offset = (size_t)(item->first_head + h) * width;
        const int is_bf16 = attention_rows_of(work, slot, offset, present, key);
        const float *query = work->at.query + (size_t)(h * work->rows_per_head) * width;
        float *score = work->at.score + (size_t)(h * work->rows_per_head) * ATTENTION_TILE;
        for (int j = present.first & ~7; j < present.end; j += 8) {
            for (int i = j; i < j + 8; i++) {
                attention_fetch(work->call->kv, slot[i] + offset + kv_width, width, element);
                if (next_slot) attention_fetch(work->call->kv, next_slot[i] + offset, width, element);
            }
            /* Queries before see none of these keys; with a window, those behind neither. */
            int begin = tile_start + j - item->position, end = item->count;
            if (begin < 0) begin = 0;
            if (shape->window > 0) {
                const int64_t last = (int64_t)tile_start + j + 7 + shape->window - 1 - item->position;
                if (last + 1 < end) end = (int)(last + 1);
            }
            for (int row = begin * work->fold; row < end * work->fold;) {
                const int rows = tile_take(end * work->fold - row);
                const float *q[TILE_ROWS];
                for (int i = 0; i < rows; i++) q[i] = query + (size_t)(row + i) * width;
                tile_some_dots(q, rows, key + j, is_bf16, present.end - j > 4 ? 8 : 4, width,
                               score + (size_t)row * ATTENTION_TILE + j, ATTENTION_TILE);
                row += rows;
            }
        }
    }
}

/* Scores become weights, and all rows learn how to join this tile. */
static void attention_soften_tile(const attention_work *work, int tile_start) {
    const attention_item *item = work->item;
    const attention_scratch *at = &work->at;
    int row = 0;
    for (int h = 0; h < item->num_heads; h++)
        for (int query = 0; query < item->count; query++) {
            const attention_span span =
                attention_sees(work->call->shape, item->position + query, tile_start);
            for (int f = 0; f < work->fold; f++, row++) {
                /* A row that sees nothing is not written; the factors made for it are not used. */
                at->tile_max[row] = at->max[row];
                at->tile_weight[row] = 0.0f;
                if (span.first < span.end)
                    attention_soften(work->call->shape, span,
                                     at->score + (size_t)row * ATTENTION_TILE, &at->tile_max[row],
                                     &at->tile_weight[row]);
            }
        }
    if (item->partial >= 0) return;
    for (int r = 0; r < work->num_rows; r += 8)
        attention_join_weights(at->max + r, at->weight + r, at->tile_max + r, at->tile_weight + r,
                               at->keep + r, at->take + r);
    /* A row's first tile is taken as it is: there is nothing yet to compare it with. */
    row = 0;
    for (int h = 0; h < item->num_heads; h++)
        for (int query = 0; query < item->count; query++) {
            const int is_first = attention_first_tile(work->call->shape, item->position + query) ==
                                 tile_start / ATTENTION_TILE;
            for (int f = 0; f < work->fold; f++, row++)
                if (is_first) {
                    at->max[row] = at->tile_max[row];
                    at->weight[row] = at->tile_weight[row];
                }
        }
}

/* A few rows of a kv head, whose spans may differ: the keys that all of them see in one go, those before
 * and behind row by row. */
INLINE void attention_weigh_some(const attention_work *work, const void *const *value, int is_bf16,
                                 int tile_start, int local, int row, int rows, size_t d, int width,
                                 const attention_target *head_target) {
    const attention_shape *shape = work->call->shape;
    attention_span span[TILE_ROWS], shared = {0, ATTENTION_TILE};
    int is_join[TILE_ROWS], is_uniform = 1;
    for (int i = 0; i < rows; i++) {
        const int own = work->item->position + (local + i) / work->fold;
        span[i] = attention_sees(shape, own, tile_start);
        is_join[i] = attention_first_tile(shape, own) != tile_start / ATTENTION_TILE;
        if (span[i].first > shared.first) shared.first = span[i].first;
        if (span[i].end < shared.end) shared.end = span[i].end;
        is_uniform &= span[i].first == span[0].first && span[i].end == span[0].end &&
                      is_join[i] == is_join[0];
    }
    const float *weight = work->at.score + (size_t)row * ATTENTION_TILE;
    attention_target to = attention_target_at(*head_target, local);
    if (is_uniform) {
        if (span[0].first >= span[0].end) return;
        if (!is_join[0]) to.keep = NULL;
        attention_weigh_rows(weight, value, is_bf16, span[0], rows, d, width, 1, 1, &to);
        return;
    }
    if (shared.first >= shared.end) shared.first = shared.end = ATTENTION_TILE;
    for (int i = 0; i < rows; i++) {
        attention_span before = {span[i].first, span[i].end < shared.first ? span[i].end : shared.first};
        const attention_target one = attention_target_at(to, i);
        attention_weigh_rows(weight + i * ATTENTION_TILE, value, is_bf16, before, 1, d, width, 1, 0,
                             &one);
    }
    attention_weigh_rows(weight, value, is_bf16, shared, rows, d, width, 0, 0, &to);
    for (int i = 0; i < rows; i++) {
        if (span[i].first >= span[i].end) continue;
        attention_span behind = {span[i].end < shared.end ? span[i].end : shared.end, span[i].end};
        attention_target one = attention_target_at(to, i);
        if (!is_join[i]) one.keep = NULL;
        attention_weigh_rows(weight + i * ATTENTION_TILE, value, is_bf16, behind, 1, d, width, 0, 1,
                             &one);
    }
}

/* Weighted values of all rows, joined to their sums or left in `partials`. */
static void attention_weigh_tile(const attention_work *work, int tile_start, attention_span present,
                                 const size_t *slot) {
    const attention_shape *shape = work->call->shape;
    const attention_item *item = work->item;
    const size_t width = (size_t)shape->head_dim;
    const size_t kv_width = (size_t)shape->num_kv_heads * width;
    const void *value[ATTENTION_TILE];
    for (int h = 0; h < item->num_heads; h++) {
        const int first_row = h * work->rows_per_head;
        const size_t offset = kv_width + (size_t)(item->first_head + h) * width;
        const int is_bf16 = attention_rows_of(work, slot, offset, present, value);
        attention_target to = {work->at.sum + (size_t)first_row * width,
                               work->at.part + (size_t)first_row * width,
                               work->at.keep + first_row,
                               work->at.take + first_row,
                               width,
                               width};
        if (item->partial >= 0) {
            const size_t floats = attention_partial_floats(shape);
            const size_t tile = (size_t)(tile_start / ATTENTION_TILE - item->first_tile);
            const size_t heads = tile * (size_t)shape->num_kv_heads + (size_t)(item->first_head + h);
            to.sum = work->call->partials + item->partial +
                     heads * (size_t)work->rows_per_head * floats;
            to.row_stride = floats;
            to.keep = to.take = NULL;
            for (int r = 0; r < work->rows_per_head; r++) {
                to.sum[(size_t)r * floats + width] = work->at.tile_max[first_row + r];
                to.sum[(size_t)r * floats + width + 1] = work->at.tile_weight[first_row + r];
            }
        }
        for (size_t d = 0; d < width;) {
            const int vectors = width - d >= 32 ? 4 : width - d >= 16 ? 2 : 1;
            for (int r = 0; r < work->rows_per_head;) {
                const int rows = tile_take(work->rows_per_head - r);
                if (is_bf16)
                    attention_weigh_some(work, value, 1, tile_start, r, first_row + r, rows, d,
                                         vectors, &to);
                else
                    attention_weigh_some(work, value, 0, tile_start, r, first_row + r, rows, d,
                                         vectors, &to);
                r += rows;
            }
            d += (size_t)vectors * 8;
        }
    }
}

/* Where query head f of a kv head begins in row `query` of an item. */
INLINE size_t attention_place(const attention_work *work, int64_t stride, int query, int kv_head, int f) {
    return (size_t)(work->item->first_row + query) * (size_t)stride +
           (size_t)(kv_head * work->fold + f) * (size_t)work->call->shape->head_dim;
}

#if ATTENTION_HAS_AMX
INLINE void attention_store_packed(const float *sum, float weight, size_t head_dim, uint16_t *out) {
    const __m512 total = _mm512_set1_ps(weight);
    for (size_t d = 0; d < head_dim; d += AMX_K) {
        __m512 mean[2] = {_mm512_div_ps(_mm512_load_ps(sum + d), total),
                          _mm512_div_ps(_mm512_load_ps(sum + d + AMX_ROWS), total)};
        attention_dims_in_order(mean);
        _mm512_mask_storeu_epi32(out + d, pack_pairs(d, head_dim),
                                 (__m512i)_mm512_cvtne2ps_pbh(mean[1], mean[0]));
    }
}
#endif

static void attention_store(const attention_work *work, int query, int kv_head, int f,
                            const float *sum, float weight) {
    const attention_call *call = work->call;
    const size_t at = attention_place(work, call->out_stride, query, kv_head, f);
#if ATTENTION_HAS_AMX
    if (call->shape->in_tiles) {
        attention_store_packed(sum, weight, (size_t)call->shape->head_dim, (uint16_t *)call->out + at);
        return;
    }
#endif
    const v8 total = v8_all(weight);
    for (int d = 0; d < call->shape->head_dim; d += 8) {
        const v8 mean = v8_div(v8_load(sum + d), total);
        if (call->shape->is_bf16)
            v8_store_bf16((uint16_t *)call->out + at + d, mean);
        else
            v8_store((float *)call->out + at + d, mean);
    }
}

INLINE attention_work attention_begin(const attention_call *call, const attention_item *item,
                                      float *scratch) {
    attention_work work = {.call = call, .item = item};
    work.fold = call->shape->num_heads / call->shape->num_kv_heads;
    work.rows_per_head = item->count * work.fold;
    work.num_rows = item->num_heads * work.rows_per_head;
    if (call->shape->in_tiles)
        attention_tile_layout(call->shape, scratch, &work.tiles);
    else
        attention_layout(call->shape, scratch, &work.at);
    return work;
}

#if ATTENTION_HAS_AMX
/* ------------------------------------------------------------------------ an item, in hardware's tiles */

/* A kv head of an item at a tile of keys, packed. */
typedef struct {
    const uint16_t *kv; /* of the head: a slot's keys; its values are kv_width behind */
    const size_t *slot;
    attention_span present;
    int tile;
    int first_row;   /* of the scratch */
    int is_turned;   /* its rows are one tile: queries are packed, keys are not */
    int is_finite;   /* all values that are present */
    uint16_t *keys;  /* packed */
    uint16_t *values;
    float *partials; /* of the head's rows at this tile; NULL: they are joined here */
} attention_tile_head;

/* Up to AMX_ROWS rows of a kv head. */
typedef struct {
    const attention_tile_head *head;
    int row; /* the first, of the head's */
    int rows;
    attention_span span[AMX_ROWS]; /* that each sees */
    int is_first[AMX_ROWS];        /* whether its joining begins with this tile */
    attention_span any;            /* from the first key that one sees to the last; none: none */
    int is_alike;                  /* all see all keys that are present */
} attention_tile_group;

/* Pointers to what lies `behind` a head's keys, for keys [first, end); zeros elsewhere. */
INLINE void attention_tile_rows(const attention_work *work, const attention_tile_head *head,
                                attention_span keys, size_t behind, const uint16_t **row) {
    for (int j = 0; j < keys.first; j++) row[j] = work->tiles.blank;
    for (int j = keys.first; j < keys.end; j++) row[j] = head->kv + head->slot[j] + behind;
    for (int j = keys.end; j < ATTENTION_TILE; j++) row[j] = work->tiles.blank;
}

/* Packs values of keys [first, end); whether they are finite. */
INLINE int attention_tile_values(const attention_work *work, const attention_tile_head *head,
                                 attention_span keys) {
    const attention_shape *shape = work->call->shape;
    const uint16_t *value[ATTENTION_TILE];
    attention_tile_rows(work, head, keys, (size_t)shape->num_kv_heads * (size_t)shape->head_dim, value);
    return attention_pack_values(value, keys.first / AMX_K, (keys.end + AMX_K - 1) / AMX_K,
                                 (size_t)shape->head_dim, head->values);
}

INLINE attention_tile_group attention_tile_group_of(const attention_work *work,
                                                    const attention_tile_head *head, int row, int rows) {
    const attention_shape *shape = work->call->shape;
    attention_tile_group group = {.head = head, .row = row, .rows = rows, .is_alike = 1};
    attention_span any = {ATTENTION_TILE, 0};
    int query = row / work->fold;
    for (int i = 0; i < rows; query++) {
        const int own = work->item->position + query, end = (query + 1) * work->fold - row;
        const int is_first = attention_first_tile(shape, own) == head->tile;
        const attention_span span = attention_sees(shape, own, head->tile * ATTENTION_TILE);
        for (; i < end && i < rows; i++) {
            group.span[i] = span;
            group.is_first[i] = is_first;
        }
        group.is_alike &= span.first <= head->present.first && span.end >= head->present.end;
        if (span.first >= span.end) continue;
        if (span.first < any.first) any.first = span.first;
        if (span.end > any.end) any.end = span.end;
    }
    group.any = any;
    return group;
}

INLINE int attention_is_empty(attention_span span) { return span.first >= span.end; }

/* What a group's rows know of the tile: see attention_scratch. */
typedef struct {
    float max[AMX_ROWS], weight[AMX_ROWS], keep[AMX_ROWS], take[AMX_ROWS];
} attention_tile_rates;

/* A group's scores become weights; its rows learn how to join the tile. */
INLINE void attention_tile_soften(const attention_work *work, const attention_tile_group *group,
                                  attention_tile_rates *rates) {
    const attention_shape *shape = work->call->shape;
    const attention_tile_head *head = group->head;
    const float scale = shape->soft_cap > 0.0f ? 1.0f : shape->scale * 1.44269504088896341f;
    float *max = work->tiles.max + head->first_row + group->row;
    float *weight = work->tiles.weight + head->first_row + group->row;
    if (shape->soft_cap > 0.0f)
        for (int i = 0; i < group->rows; i++)
            attention_cap(shape, group->span[i], work->tiles.score + i * ATTENTION_TILE);
    if (group->is_alike && head->present.first == 0 && head->present.end == ATTENTION_TILE) {
        attention_soften_rows(work->tiles.score, NULL, group->rows, scale, work->tiles.rounded, rates->max,
                              rates->weight);
    } else {
        uint64_t sees[AMX_ROWS];
        for (int i = 0; i < group->rows; i++) sees[i] = attention_span_bits(group->span[i]);
        attention_soften_rows(work->tiles.score, sees, group->rows, scale, work->tiles.rounded, rates->max,
                              rates->weight);
        /* Not joined: its maximum stays. */
        for (int i = 0; i < group->rows; i++)
            if (attention_is_empty(group->span[i])) rates->max[i] = max[i];
    }
    if (head->partials) return;
    for (int i = 0; i < group->rows; i += 8)
        attention_join_weights(max + i, weight + i, rates->max + i, rates->weight + i, rates->keep + i,
                               rates->take + i);
    for (int i = 0; i < group->rows; i++)
        if (group->is_first[i]) {
            max[i] = rates->max[i];
            weight[i] = rates->weight[i];
        }
}

/* Rows [begin, end) of a group: their weighted values, in `part`, become part of their sums. */
INLINE void attention_tile_join(const attention_work *work, const attention_tile_group *group, int begin,
                                int end, const attention_tile_rates *rates) {
    const attention_tile_head *head = group->head;
    const size_t width = attention_sum_width(work->call->shape);
    const size_t floats = attention_partial_floats(work->call->shape);
    for (int i = begin; i < end; i++) {
        if (attention_is_empty(group->span[i])) continue;
        const int row = group->row + i;
        const float *part = work->tiles.part + (size_t)i * width;
        float *sum = work->tiles.sum + (size_t)(head->first_row + row) * width;
        if (head->partials) {
            sum = head->partials + (size_t)row * floats;
            sum[width] = rates->max[i];
            sum[width + 1] = rates->weight[i];
        }
        if (head->partials || group->is_first[i]) {
            for (size_t d = 0; d < width; d += 16) _mm512_storeu_ps(sum + d, _mm512_load_ps(part + d));
            continue;
        }
        const __m512 keep = _mm512_set1_ps(rates->keep[i]), take = _mm512_set1_ps(rates->take[i]);
        for (size_t d = 0; d < width; d += 16) {
            const __m512 kept = _mm512_mul_ps(_mm512_load_ps(sum + d), keep);
            _mm512_store_ps(sum + d, _mm512_fmadd_ps(_mm512_load_ps(part + d), take, kept));
        }
    }
}

INLINE void attention_tile_weigh(const attention_work *work, const attention_tile_head *head,
                                 attention_span keys) {
    attention_weigh_packed(work->tiles.rounded, head->values, keys.first / AMX_K,
                           (keys.end + AMX_K - 1) / AMX_K, attention_sum_width(work->call->shape),
                           work->tiles.part);
}

/* Scores of a head's only group. Keys are read where they lie, if 16 do so side by side and in full tiles. */
INLINE void attention_tile_score_turned(const attention_work *work, const attention_tile_head *head,
                                        const uint16_t *query, attention_span any) {
    const attention_shape *shape = work->call->shape;
    const size_t head_dim = (size_t)shape->head_dim, width = attention_sum_width(shape);
    const size_t slot_width = 2 * (size_t)shape->num_kv_heads * head_dim;
    const int may_lie = head_dim == width && shape->block_size % AMX_ROWS == 0;
    for (int first = any.first / AMX_ROWS * AMX_ROWS; first < any.end; first += AMX_ROWS) {
        const uint16_t *key = head->kv + head->slot[first];
        size_t stride = slot_width;
        if (!may_lie || head->present.first > first || head->present.end < first + AMX_ROWS) {
            memset(head->keys, 0, AMX_ROWS * width * sizeof(uint16_t));
            for (int j = 0; j < AMX_ROWS; j++)
                if (first + j >= head->present.first && first + j < head->present.end)
                    memcpy(head->keys + (size_t)j * width, head->kv + head->slot[first + j],
                           head_dim * sizeof(uint16_t));
            key = head->keys;
            stride = width;
        }
        attention_scores_turned(key, stride * sizeof(uint16_t), width, query, work->rows_per_head,
                                work->tiles.turned, work->tiles.score + first);
    }
}

/* A group against its head's packed keys and values. Groups one after the other: their steps in any other order
 * were not faster, and need more memory at a time. */
static void attention_tile_some(const attention_work *work, const attention_tile_group *group) {
    const attention_tile_head *head = group->head;
    const size_t width = attention_sum_width(work->call->shape);
    const int first_row = head->first_row + group->row;
    attention_tile_rates rates;
    const uint16_t *query = work->tiles.query + (size_t)first_row * width;
    if (head->is_turned)
        attention_tile_score_turned(work, head, query, group->any);
    else
        attention_scores(query, width, head->keys, group->any.first / AMX_ROWS,
                         (group->any.end + AMX_ROWS - 1) / AMX_ROWS, work->tiles.score);
    attention_tile_soften(work, group, &rates);
    if (head->is_finite || group->is_alike) {
        attention_tile_weigh(work, head, group->any);
        attention_tile_join(work, group, 0, group->rows, &rates);
        return;
    }
    /* A row must not see a value that is not finite. Row by row, then, with zeros for the values it does not see. */
    for (int i = 0; i < group->rows; i++) {
        if (attention_is_empty(group->span[i])) continue;
        attention_tile_values(work, head, group->span[i]);
        attention_tile_weigh(work, head, group->span[i]);
        attention_tile_join(work, group, i, i + 1, &rates);
    }
    attention_tile_values(work, head, head->present);
}

INLINE void attention_tile_pack(const attention_work *work, attention_tile_head *head) {
    const attention_span keys = head->present;
    const uint16_t *key[ATTENTION_TILE];
    if (!head->is_turned) {
        attention_tile_rows(work, head, keys, 0, key);
        attention_pack_keys(key, keys.first / AMX_ROWS, (keys.end + AMX_ROWS - 1) / AMX_ROWS,
                            (size_t)work->call->shape->head_dim, head->keys);
    }
    head->is_finite = attention_tile_values(work, head, keys);
}

/* Keys and values of an item's heads, of a share of a tile's keys: slot by slot, as they lie. */
INLINE void attention_tile_fetch(const attention_work *work, const size_t *slot, attention_span keys,
                                 int share, int num_shares) {
    const attention_shape *shape = work->call->shape;
    const size_t head_dim = (size_t)shape->head_dim;
    const size_t at = (size_t)work->item->first_head * head_dim;
    const size_t width = (size_t)work->item->num_heads * head_dim;
    const int count = keys.end - keys.first;
    for (int j = keys.first + count * share / num_shares;
         j < keys.first + count * (share + 1) / num_shares; j++) {
        attention_fetch(work->call->kv, slot[j] + at, width, sizeof(uint16_t));
        attention_fetch(work->call->kv, slot[j] + at + (size_t)shape->num_kv_heads * head_dim, width,
                        sizeof(uint16_t));
    }
}

/* A thread's tiles: those of rows (sums and A) as short as the item's. */
INLINE void attention_configure(int rows, int *configured) {
    if (rows > AMX_ROWS) rows = AMX_ROWS;
    if (*configured == rows) return;
    amx_config config = amx_full();
    for (int i = 0; i <= 4; i++) config.rows[i] = (uint8_t)rows;
    amx_configure(&config);
    *configured = rows;
}

static void attention_run_tiles(const attention_call *call, const attention_item *item, float *scratch,
                                int *configured) {
    const attention_shape *shape = call->shape;
    const attention_work work = attention_begin(call, item, scratch);
    const attention_tile_scratch *at = &work.tiles;
    const size_t head_dim = (size_t)shape->head_dim, width = attention_sum_width(shape);
    const int head_rows = (work.rows_per_head + AMX_ROWS - 1) / AMX_ROWS * AMX_ROWS;
    attention_configure(work.rows_per_head, configured);
    memset(at->blank, 0, width * sizeof(uint16_t));
    const int is_turned = work.rows_per_head <= AMX_ROWS;
    for (int h = 0; h < item->num_heads; h++) {
        uint16_t *query = at->query + (size_t)(h * head_rows) * width;
        const uint16_t *row[AMX_ROWS];
        for (int i = 0; is_turned && i < AMX_ROWS; i++) row[i] = at->blank;
        for (int i = 0, r = 0; i < item->count; i++)
            for (int f = 0; f < work.fold; f++, r++) {
                const uint16_t *from = (const uint16_t *)call->q +
                                       attention_place(&work, call->q_stride, i, item->first_head + h, f);
                if (is_turned) {
                    row[r] = from;
                    continue;
                }
                memcpy(query + (size_t)r * width, from, head_dim * sizeof(uint16_t));
                memset(query + (size_t)r * width + head_dim, 0, (width - head_dim) * sizeof(uint16_t));
            }
        for (size_t d = 0; is_turned && d < width; d += AMX_K)
            attention_pack_group(row, d, head_dim, query + d / AMX_K * PACK_TILE);
    }
    memset(at->max, 0, (size_t)(item->num_heads * head_rows) * sizeof(float));
    memset(at->weight, 0, (size_t)(item->num_heads * head_rows) * sizeof(float));

    size_t slot[2][ATTENTION_TILE];
    attention_span present[2];
    for (int tile = item->first_tile; tile < item->end_tile; tile++) {
        const int own = tile & 1, is_last = tile + 1 == item->end_tile;
        attention_find_keys(call, item, tile, present, slot);
        for (int h = 0; h < item->num_heads; h++) {
            const int kv_head = item->first_head + h;
            attention_tile_head head = {.kv = (const uint16_t *)call->kv + (size_t)kv_head * head_dim,
                                        .slot = slot[own],
                                        .present = present[own],
                                        .tile = tile,
                                        .first_row = h * head_rows,
                                        .is_turned = is_turned,
                                        .keys = at->keys,
                                        .values = at->values};
            if (item->partial >= 0) {
                const size_t before = (size_t)(tile - item->first_tile) * (size_t)shape->num_kv_heads +
                                      (size_t)kv_head;
                head.partials = call->partials + item->partial +
                                before * (size_t)work.rows_per_head * attention_partial_floats(shape);
            }
            if (!is_last)
                attention_tile_fetch(&work, slot[!own], present[!own], h, item->num_heads);
            attention_tile_pack(&work, &head);
            for (int row = 0; row < work.rows_per_head; row += AMX_ROWS) {
                const int left = work.rows_per_head - row;
                const attention_tile_group group =
                    attention_tile_group_of(&work, &head, row, left < AMX_ROWS ? left : AMX_ROWS);
                if (!attention_is_empty(group.any)) attention_tile_some(&work, &group);
            }
        }
    }
    if (item->partial >= 0) return;
    for (int h = 0; h < item->num_heads; h++)
        for (int i = 0, row = h * head_rows; i < item->count; i++)
            for (int f = 0; f < work.fold; f++, row++)
                attention_store(&work, i, item->first_head + h, f, at->sum + (size_t)row * width,
                                at->weight[row]);
}
#endif

static void attention_run(const attention_call *call, const attention_item *item, float *scratch) {
    const attention_shape *shape = call->shape;
    const attention_work work = attention_begin(call, item, scratch);
    /* Weights are powers of two, so log2(e) is part of the scale; under a cap, it is part of the cap. */
    const v8 scale = v8_all(shape->soft_cap > 0.0f ? shape->scale / shape->soft_cap
                                                   : shape->scale * 1.44269504088896341f);
    float *query = work.at.query;
    for (int h = 0; h < item->num_heads; h++)
        for (int i = 0; i < item->count; i++)
            for (int f = 0; f < work.fold; f++)
                for (int d = 0; d < shape->head_dim; d += 8, query += 8) {
                    const size_t at = attention_place(&work, call->q_stride, i, item->first_head + h, f);
                    v8_store(query, v8_mul(scale, tile_load(call->q, at + (size_t)d, shape->is_bf16)));
                }
    for (int r = 0; r < work.num_rows; r++) work.at.max[r] = work.at.weight[r] = 0.0f;

    size_t slot[2][ATTENTION_TILE];
    attention_span present[2];
    for (int tile = item->first_tile; tile < item->end_tile; tile++) {
        const int own = tile & 1, is_last = tile + 1 == item->end_tile;
        attention_find_keys(call, item, tile, present, slot);
        const int start = tile * ATTENTION_TILE;
        attention_score_tile(&work, start, present[own], slot[own], is_last ? NULL : slot[!own]);
        attention_soften_tile(&work, start);
        attention_weigh_tile(&work, start, present[own], slot[own]);
    }
    if (item->partial >= 0) return;
    int row = 0;
    for (int h = 0; h < item->num_heads; h++)
        for (int i = 0; i < item->count; i++)
            for (int f = 0; f < work.fold; f++, row++)
                attention_store(&work, i, item->first_head + h, f,
                                work.at.sum + (size_t)row * (size_t)shape->head_dim,
                                work.at.weight[row]);
}

/* Joins the tiles that several items left for one kv head of the same queries, in order. */
static void attention_merge(const attention_call *call, const attention_item *item, int kv_head,
                            float *scratch) {
    const attention_shape *shape = call->shape;
    const attention_work work = attention_begin(call, item, scratch);
    const size_t width = attention_sum_width(shape), floats = attention_partial_floats(shape);
    float *sum = shape->in_tiles ? work.tiles.sum : work.at.sum;
    for (int row = 0; row < work.rows_per_head; row++) {
        const int own = item->position + row / work.fold;
        const int first = attention_first_tile(shape, own), last = own / ATTENTION_TILE;
        /* One lane of eight is used: the lanes compute alike. */
        float max[8] = {0}, weight[8] = {0}, tile_max[8], tile_weight[8], keep[8], take[8];
        for (int tile = first; tile <= last; tile++) {
            const size_t heads = (size_t)(tile - item->first_tile) * (size_t)shape->num_kv_heads +
                                 (size_t)kv_head;
            const float *from = call->partials + item->partial +
                                (heads * (size_t)work.rows_per_head + (size_t)row) * floats;
            if (tile == first) {
                memcpy(sum, from, sizeof(float) * width);
                v8_store(max, v8_all(from[width]));
                v8_store(weight, v8_all(from[width + 1]));
                continue;
            }
            v8_store(tile_max, v8_all(from[width]));
            v8_store(tile_weight, v8_all(from[width + 1]));
            attention_join_weights(max, weight, tile_max, tile_weight, keep, take);
            const v8 keep8 = v8_all(keep[0]), take8 = v8_all(take[0]);
            for (size_t d = 0; d < width; d += 8)
                v8_store(sum + d, attention_join(v8_load(sum + d), v8_load(from + d), keep8, take8));
        }
        attention_store(&work, row / work.fold, kv_head, row % work.fold, sum, weight[0]);
    }
}

typedef struct {
    const attention_call *call;
    const attention_item *items;
    float *scratch;
    size_t floats; /* of a thread's scratch */
} attention_job;

static void attention_share(void *context, pool_share *share, int64_t item, int32_t thread) {
    const attention_job job = *(const attention_job *)context;
    float *own = job.scratch + (size_t)thread * job.floats;
#if ATTENTION_HAS_AMX
    int configured = 0; /* rows of this thread's tiles */
#endif
    for (; item >= 0; item = pool_next(share)) {
#if ATTENTION_HAS_AMX
        if (job.call->shape->in_tiles) {
            attention_run_tiles(job.call, job.items + item, own, &configured);
            continue;
        }
#endif
        attention_run(job.call, job.items + item, own);
    }
#if ATTENTION_HAS_AMX
    if (configured) amx_release();
#endif
}

/* An item for each kv head of each merge. */
static void attention_share_merges(void *context, pool_share *share, int64_t item, int32_t thread) {
    const attention_job job = *(const attention_job *)context;
    const int64_t heads = job.call->shape->num_kv_heads;
    for (; item >= 0; item = pool_next(share))
        attention_merge(job.call, job.items + item / heads, (int)(item % heads),
                        job.scratch + (size_t)thread * job.floats);
}

/* q: rows of at least num_heads * head_dim, out: rows of num_heads * head_dim; kv: one layer's slots; table:
 * (sequences, table_width); merges: the queries whose tiles several items left in `partials`, with all of
 * their tiles and heads; scratch: num_threads * attention_scratch_floats(). Rows that no item names are
 * not written. */
void attention_forward(const attention_call *call, const attention_item *items, int32_t num_items,
                       const attention_item *merges, int32_t num_merges, float *scratch,
                       int32_t num_threads) {
    attention_job job = {call, items, scratch, attention_scratch_floats(call->shape)};
    pool_run(attention_share, &job, num_items, num_threads);
    /* All partials are there. */
    job.items = merges;
    pool_run(attention_share_merges, &job, (int64_t)num_merges * call->shape->num_kv_heads, num_threads);
}
