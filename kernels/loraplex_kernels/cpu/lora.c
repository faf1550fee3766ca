/* LoRA deltas for a batch of rows with different adapters: y[row] += B (scale * (A x[row])).
 *
 * Row rule: what a row gets depends on its own x and adapter only, bit for bit. Every sum has one
 * fixed order, whatever tile it is computed in and whichever thread computes it:
 *   - shrink, h[r] = scale * <a[r], x>: 8 partial sums by k mod 8, added up in one fixed tree, then
 *     the last K mod 8 products one by one (tiles.h);
 *   - expand, d[n] = sum over r, in order of r; y[n] = round(y[n] + d[n]), once.
 * An embedding's x is a token id: its shrink is a row of A transposed, h = scale * a[id], no sum at all.
 * Products are fused with their additions by explicit FMA, never left to the compiler. Where the CPU has matrix
 * tiles for bf16, weights laid out for them (LORA_TILES) meet bf16 rows in those, for every number of rows:
 * layout, order and rounding of that are in lora_tiles.h, and what follows is of the others.
 *
 * Weights are bf16 or fp32 as stored, sums fp32. `a` is (rank of all slices, K), row-major; `b` of a
 * slice is in blocks of LORA_OUT_BLOCK outputs, (ceil(N / LORA_OUT_BLOCK), rank, LORA_OUT_BLOCK),
 * zero-padded, so that both are read front to back once per chunk of rows. An embedding's `a` is
 * (vocabulary, rank).
 *
 * A call has two phases, all of h and then all of y. In each, every thread takes an equal share of the work,
 * cut wherever it falls: between adapters, chunks of an adapter's rows, or the columns of one chunk.
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "simd.h"
#include "calls.h"
#include "pool.h"
#include "lora_tiles.h"
#include "tiles.h"
#include "v16.h"

lora_add_call lora_add;

#define LORA_SLICES 3
#define LORA_OUT_BLOCK 32
#define LORA_CHUNK 24     /* rows that share what is read of the weights */
#define LORA_RANKS 8      /* ranks whose a is kept in cache while the rows of a chunk pass */
#define LORA_B_BYTES 16384 /* of b, likewise */
/* What reading a weight costs beside its product with one row, in products. */
#define LORA_READ_COST 4
/* With LORA_TILES a weight costs its reading, about as much as one product of a row elsewhere, and the products
 * of a chunk's rows nothing beside it; an output of a row costs its addition to y. */
#define LORA_ADD_COST 2
/* Products, read costs counted, below which other threads cost more than they help. Four rows of four adapters of
 * rank 16 take 3.4 ms a step with this, 5.1 with four times as many. */
#define LORA_MIN_SHARED 100000

/* ------------------------------------------------------------------------------------- weights */

/* LORA_TILES: one plane of bf16; LORA_TILES + 1: two. Only with bf16 rows, never an embedding's. */
enum { LORA_FP32, LORA_BF16, LORA_TILES };

/* One (layer, site) of one adapter; all zero where the adapter does not touch the site. */
typedef struct {
    const void *a;
    const void *b[LORA_SLICES];
    float scale[LORA_SLICES];
    int32_t rank[LORA_SLICES];
    int32_t format;
    int32_t rank_total;
} lora_site;

/* What is the same for all calls of a step. */
typedef struct lora_step {
    const lora_site *const *sites; /* by group (adapter): its table, indexed by site */
    const int32_t *rows;           /* row of x and y, sorted by group, ascending within one */
    const int32_t *begins;         /* by group: its first place in `rows`; and their number */
    float *h;                      /* (number of rows, h_stride), in the order of `rows` */
    float *wide;                   /* (num_threads, LORA_CHUNK, wide_stride): rows of a bf16 x, or of x in one piece */
    int64_t h_stride;              /* at least every rank_total, rounded up to TILE_COLS, or, with LORA_TILES, the
                                    * padded ranks of a site, rounded up to LORA_TILE */
    int64_t wide_stride;           /* at least every K, a multiple of AMX_K */
    int32_t num_groups;
    int32_t num_threads;
} lora_step;

/* One call. */
typedef struct {
    const lora_step *step;
    void *y;
    const void *x;            /* NULL for an embedding */
    const int64_t *token_ids; /* NULL for a linear */
    const int32_t *slice_begin;
    int64_t num_inputs;
    int64_t num_outputs;
    int32_t is_bf16; /* x and y */
    int32_t site_index;
} lora_call;

/* What a thread has of its own. */
typedef struct {
    float *wide; /* its part of the step's */
    lora_tile_shape shape;
} lora_worker;

/* Rows [begin, end) of `rows`, all of one adapter. */
typedef struct {
    const lora_site *site;
    int begin;
    int end;
} lora_chunk;

INLINE int lora_planes(const lora_site *site) { return site->format - LORA_TILES + 1; }

INLINE int lora_padded_total(const lora_site *site) {
    int total = 0;
    for (int s = 0; s < LORA_SLICES; s++) total += lora_padded_rank(site->rank[s]);
    return total;
}

/* -------------------------------------------------------------------------------------- shrink */

/* Ranks [first, end) of h for a chunk; first is a multiple of TILE_COLS. Up to TILE_COLS - 1 ranks that do not
 * exist repeat the last one, in places of h that nobody reads. */
static void lora_shrink(const lora_call *call, lora_chunk chunk, int first, int end, float *wide) {
    const lora_step *step = call->step;
    const lora_site *site = chunk.site;
    const int is_bf16 = site->format == LORA_BF16;
    const size_t num_inputs = (size_t)call->num_inputs, size = is_bf16 ? 2 : 4;
    const float *x[LORA_CHUNK];
    const int num_rows = chunk.end - chunk.begin;
    for (int i = 0; i < num_rows; i++) {
        const size_t from = (size_t)step->rows[chunk.begin + i] * num_inputs;
        if (!call->is_bf16) {
            x[i] = (const float *)call->x + from;
            continue;
        }
        float *to = wide + (size_t)i * (size_t)step->wide_stride;
        const uint16_t *bits = (const uint16_t *)call->x + from;
        size_t k = 0;
        for (; k + 8 <= num_inputs; k += 8) v8_store(to + k, v8_load_bf16(bits + k));
        for (; k < num_inputs; k++) to[k] = widen_bf16(bits[k]);
        x[i] = to;
    }
    float *h = step->h + (size_t)chunk.begin * (size_t)step->h_stride;
    for (int rank = first; rank < end; rank += LORA_RANKS) {
        const int cols = end - rank < LORA_RANKS ? end - rank : LORA_RANKS;
        const void *a[LORA_RANKS];
        for (int j = 0; j < LORA_RANKS; j++) {
            const int own = rank + (j < cols ? j : cols - 1);
            a[j] = (const char *)site->a + (size_t)own * num_inputs * size;
        }
        for (int i = 0; i < num_rows;) {
            const int rows = tile_take(num_rows - i);
            tile_some_dots(x + i, rows, a, is_bf16, cols > TILE_COLS ? 2 * TILE_COLS : TILE_COLS,
                           num_inputs, h + (size_t)i * (size_t)step->h_stride + rank,
                           (size_t)step->h_stride);
            i += rows;
        }
    }
    for (int i = 0; i < num_rows; i++) {
        float *row = h + (size_t)i * (size_t)step->h_stride;
        for (int s = 0, begin = 0; s < LORA_SLICES; begin += site->rank[s++])
            for (int r = begin; r < begin + site->rank[s]; r++)
                if (r >= first && r < end) row[r] *= site->scale[s];
    }
}

/* All of h for a chunk of an embedding. */
static void lora_look_up(const lora_call *call, lora_chunk chunk) {
    const lora_step *step = call->step;
    const lora_site *site = chunk.site;
    const size_t rank = (size_t)site->rank[0];
    for (int i = chunk.begin; i < chunk.end; i++) {
        const size_t from = (size_t)call->token_ids[step->rows[i]] * rank;
        float *h = step->h + (size_t)i * (size_t)step->h_stride;
        for (size_t r = 0; r < rank; r++)
            h[r] = site->scale[0] * tile_load_one(site->a, from + r, site->format == LORA_BF16);
    }
}

/* -------------------------------------------------------------------------------------- expand */

/* As wide as the CPU's vectors, the bits of a lane being the same. Rows of a tile by vectors of a block are as many
 * sums as hide the latency of two FMA units. */
#if HAS_V16
typedef v16 lora_v;
#define LORA_V(operation) v16_##operation
#define LORA_HOLD(value) (value) /* a load costs no more than a register, of which there are enough */
#define LORA_WIDTH 16
#define LORA_ROWS 6
#else
typedef v8 lora_v;
#define LORA_V(operation) v8_##operation
#define LORA_HOLD(value) v8_hold(value)
#define LORA_WIDTH 8
#define LORA_ROWS 3
#endif
#define LORA_VECTORS (LORA_OUT_BLOCK / LORA_WIDTH)

/* y[0 .. count) += delta, rounded once. */
INLINE void lora_add_block(void *y, size_t index, size_t count, int y_is_bf16, const lora_v *delta) {
    if (count == LORA_OUT_BLOCK && !y_is_bf16) {
        float *to = (float *)y + index;
        for (int v = 0; v < LORA_VECTORS; v++, to += LORA_WIDTH)
            LORA_V(store)(to, LORA_V(add)(LORA_V(load)(to), delta[v]));
    } else if (count == LORA_OUT_BLOCK) {
        uint16_t *to = (uint16_t *)y + index;
        for (int v = 0; v < LORA_VECTORS; v++, to += LORA_WIDTH)
            LORA_V(store_bf16)(to, LORA_V(add)(LORA_V(load_bf16)(to), delta[v]));
    } else {
        float each[LORA_OUT_BLOCK];
        for (int v = 0; v < LORA_VECTORS; v++) LORA_V(store)(each + LORA_WIDTH * v, delta[v]);
        for (size_t n = 0; n < count; n++)
            if (y_is_bf16)
                ((uint16_t *)y)[index + n] =
                    narrow_bf16(widen_bf16(((uint16_t *)y)[index + n]) + each[n]);
            else
                ((float *)y)[index + n] += each[n];
    }
}

/* Outputs of one slice, from n on up to `end`, for a tile of rows; b is at output n. */
INLINE void lora_expand_tile(void *y, const size_t *y_index, int y_is_bf16, const float *h,
                             size_t h_stride, const void *b, int is_bf16, size_t rank, size_t n,
                             size_t end, int rows) {
    for (; n < end; n += LORA_OUT_BLOCK) {
        lora_v sum[LORA_ROWS][LORA_VECTORS];
        for (int i = 0; i < rows; i++)
            for (int v = 0; v < LORA_VECTORS; v++) sum[i][v] = LORA_V(zero)();
        for (size_t r = 0; r < rank; r++) {
            lora_v weight[LORA_ROWS];
            for (int i = 0; i < rows; i++) weight[i] = LORA_V(all)(h[(size_t)i * h_stride + r]);
            for (int v = 0; v < LORA_VECTORS; v++) {
                const size_t at = r * LORA_OUT_BLOCK + (size_t)v * LORA_WIDTH;
                const lora_v b_r = LORA_HOLD(is_bf16 ? LORA_V(load_bf16)((const uint16_t *)b + at)
                                                     : LORA_V(load)((const float *)b + at));
                for (int i = 0; i < rows; i++) sum[i][v] = LORA_V(fma)(weight[i], b_r, sum[i][v]);
            }
        }
        b = (const char *)b + rank * LORA_OUT_BLOCK * (is_bf16 ? sizeof(uint16_t) : sizeof(float));
        const size_t count = end - n < LORA_OUT_BLOCK ? end - n : LORA_OUT_BLOCK;
#pragma GCC unroll 6
        for (int i = 0; i < rows; i++) lora_add_block(y, y_index[i] + n, count, y_is_bf16, sum[i]);
    }
}

#define LORA_EXPAND(rows, suffix, is_bf16)                                                          \
    APART void lora_expand_##rows##suffix(void *y, const size_t *y_index, int y_is_bf16,             \
                                          const float *h, size_t h_stride, const void *b,            \
                                          size_t rank, size_t n, size_t end) {                       \
        lora_expand_tile(y, y_index, y_is_bf16, h, h_stride, b, is_bf16, rank, n, end, rows);        \
    }
#define LORA_EXPAND_BOTH(rows) LORA_EXPAND(rows, fp32, 0) LORA_EXPAND(rows, bf16, 1)
LORA_EXPAND_BOTH(1)
LORA_EXPAND_BOTH(2)
LORA_EXPAND_BOTH(3)
#if LORA_ROWS > 3
LORA_EXPAND_BOTH(4)
LORA_EXPAND_BOTH(5)
LORA_EXPAND_BOTH(6)
#endif
#undef LORA_EXPAND
#undef LORA_EXPAND_BOTH

/* Blocks [first, end) of one slice's outputs for a chunk. */
static void lora_expand(const lora_call *call, lora_chunk chunk, int slice, int first, int end) {
    typedef void expand(void *, const size_t *, int, const float *, size_t, const void *, size_t,
                        size_t, size_t);
    static expand *const by[2][LORA_ROWS] = {
#if LORA_ROWS > 3
        {lora_expand_1fp32, lora_expand_2fp32, lora_expand_3fp32, lora_expand_4fp32,
         lora_expand_5fp32, lora_expand_6fp32},
        {lora_expand_1bf16, lora_expand_2bf16, lora_expand_3bf16, lora_expand_4bf16,
         lora_expand_5bf16, lora_expand_6bf16},
#else
        {lora_expand_1fp32, lora_expand_2fp32, lora_expand_3fp32},
        {lora_expand_1bf16, lora_expand_2bf16, lora_expand_3bf16},
#endif
    };
    const lora_step *step = call->step;
    const lora_site *site = chunk.site;
    const int is_bf16 = site->format == LORA_BF16;
    const size_t rank = (size_t)site->rank[slice], size = is_bf16 ? 2 : 4;
    const size_t width = (size_t)(call->slice_begin[slice + 1] - call->slice_begin[slice]);
    const size_t block_bytes = rank * LORA_OUT_BLOCK * size;
    const int group = LORA_B_BYTES / block_bytes > 1 ? (int)(LORA_B_BYTES / block_bytes) : 1;
    size_t rank_begin = 0;
    for (int s = 0; s < slice; s++) rank_begin += (size_t)site->rank[s];
    const float *h = step->h + (size_t)chunk.begin * (size_t)step->h_stride + rank_begin;
    size_t y_index[LORA_CHUNK];
    for (int i = 0; i < chunk.end - chunk.begin; i++)
        y_index[i] = (size_t)step->rows[chunk.begin + i] * (size_t)call->num_outputs +
                     (size_t)call->slice_begin[slice];
    for (int block = first; block < end; block += group) {
        const size_t n = (size_t)block * LORA_OUT_BLOCK;
        size_t stop = (size_t)(block + group < end ? block + group : end) * LORA_OUT_BLOCK;
        if (stop > width) stop = width;
        const char *b = (const char *)site->b[slice] + (size_t)block * block_bytes;
        for (int i = 0; i < chunk.end - chunk.begin;) {
            const int left = chunk.end - chunk.begin - i;
            const int rows = LORA_ROWS == TILE_ROWS ? tile_take(left) : left < LORA_ROWS ? left : LORA_ROWS;
            by[is_bf16][rows - 1](call->y, y_index + i, call->is_bf16,
                                        h + (size_t)i * (size_t)step->h_stride,
                                        (size_t)step->h_stride, b, rank, n, stop);
            i += rows;
        }
    }
}

/* --------------------------------------------------------------------------------------- tiles */

#if HAS_LORA_TILES
/* Blocks [first, end) of the ranks of h for a chunk of up to LORA_TILE rows. */
static void lora_shrink_in_tiles(const lora_call *call, lora_chunk chunk, int first, int end,
                                 lora_worker *worker) {
    const lora_step *step = call->step;
    const lora_site *site = chunk.site;
    const size_t row_bytes = (size_t)call->num_inputs * sizeof(uint16_t);
    const size_t steps = ((size_t)call->num_inputs + AMX_K - 1) / AMX_K;
    const int32_t *rows = step->rows + chunk.begin;
    const int num_rows = chunk.end - chunk.begin;
    const char *x = (const char *)call->x + (size_t)rows[0] * row_bytes;
    size_t x_stride = row_bytes;
    const int is_whole = row_bytes == steps * AMX_ROW_BYTES;
    /* Rows of a group ascend: as many as lie between the first and the last are all of those. */
    if (!is_whole || rows[num_rows - 1] - rows[0] != num_rows - 1) {
        x_stride = steps * AMX_ROW_BYTES;
        for (int i = 0; i < num_rows; i++) {
            char *to = (char *)worker->wide + (size_t)i * x_stride;
            memcpy(to, (const char *)call->x + (size_t)rows[i] * row_bytes, row_bytes);
            memset(to + row_bytes, 0, x_stride - row_bytes);
        }
        x = (const char *)worker->wide;
    }
    const size_t h_stride = 2 * (size_t)step->h_stride;
    const lora_tile_ranks ranks = {site->scale, site->rank, LORA_SLICES, lora_padded_total(site)};
    lora_tiles_shrink(&worker->shape, x, x_stride, site->a, steps, (size_t)lora_planes(site), num_rows,
                      ranks, first, end, (uint16_t *)step->h + (size_t)chunk.begin * h_stride, h_stride);
}

/* Columns [first, end), of LORA_TILE_OUTPUTS outputs each, of one slice for a chunk of up to LORA_TILE rows. */
static void lora_expand_in_tiles(const lora_call *call, lora_chunk chunk, int slice, int first,
                                 int end, lora_worker *worker) {
    const lora_step *step = call->step;
    const lora_site *site = chunk.site;
    const size_t h_stride = 2 * (size_t)step->h_stride;
    const size_t lo_at = lora_tiles_round_up((size_t)lora_padded_total(site), LORA_TILE);
    const size_t width = (size_t)(call->slice_begin[slice + 1] - call->slice_begin[slice]);
    const size_t stop = (size_t)end * LORA_TILE_OUTPUTS;
    const uint16_t *h = (const uint16_t *)step->h + (size_t)chunk.begin * h_stride;
    for (int s = 0; s < slice; s++) h += lora_padded_rank(site->rank[s]);
    size_t y_index[LORA_TILE];
    for (int i = 0; i < chunk.end - chunk.begin; i++)
        y_index[i] = (size_t)step->rows[chunk.begin + i] * (size_t)call->num_outputs +
                     (size_t)call->slice_begin[slice];
    lora_tiles_expand(&worker->shape, call->y, y_index, chunk.end - chunk.begin, h, h + lo_at,
                      h_stride * sizeof(uint16_t), site->b[slice], lora_planes(site), site->rank[slice],
                      (size_t)first * LORA_TILE_OUTPUTS, stop < width ? stop : width);
}
#endif

/* -------------------------------------------------------------------------------------- driver */

/* How the work of one phase is laid out for a chunk and, in expand, a slice: columns, each of the same cost. */
typedef struct {
    int columns;
    int64_t cost; /* of a column */
} lora_share;

static lora_share lora_shrink_share(const lora_call *call, lora_chunk chunk) {
    const lora_site *site = chunk.site;
    const int64_t rows = chunk.end - chunk.begin;
    if (call->x == NULL) return (lora_share){1, (rows + LORA_READ_COST) * site->rank_total};
    if (site->format >= LORA_TILES)
        return (lora_share){(lora_padded_total(site) + LORA_TILE - 1) / LORA_TILE,
                            (int64_t)LORA_TILE * lora_planes(site) * call->num_inputs};
    return (lora_share){(site->rank_total + TILE_COLS - 1) / TILE_COLS,
                        (rows + LORA_READ_COST) * TILE_COLS * call->num_inputs};
}

static lora_share lora_expand_share(const lora_call *call, lora_chunk chunk, int slice) {
    const lora_site *site = chunk.site;
    const int64_t rows = chunk.end - chunk.begin, rank = site->rank[slice];
    const int width = call->slice_begin[slice + 1] - call->slice_begin[slice];
    if (site->format >= LORA_TILES)
        return (lora_share){(width + LORA_TILE_OUTPUTS - 1) / LORA_TILE_OUTPUTS,
                            (rank * lora_planes(site) + LORA_ADD_COST * rows) * LORA_TILE_OUTPUTS};
    return (lora_share){(width + LORA_OUT_BLOCK - 1) / LORA_OUT_BLOCK,
                        (rows + LORA_READ_COST) * (rank + 2) * LORA_OUT_BLOCK};
}

/* The columns that lie before a mark on the scale that threads' shares are cut from. */
INLINE int lora_cut(int64_t at, lora_share share, int64_t mark) {
    if (mark <= at) return 0;
    const int64_t columns = (mark - at + share.cost - 1) / share.cost;
    return columns < share.columns ? (int)columns : share.columns;
}

static void lora_shrink_some(const lora_call *call, lora_chunk chunk, lora_share share, int first,
                             int end, lora_worker *worker) {
    if (call->x == NULL)
        lora_look_up(call, chunk);
#if HAS_LORA_TILES
    else if (chunk.site->format >= LORA_TILES)
        lora_shrink_in_tiles(call, chunk, first, end, worker);
#endif
    else
        lora_shrink(call, chunk, first * TILE_COLS,
                    end == share.columns ? chunk.site->rank_total : end * TILE_COLS, worker->wide);
}

static void lora_expand_some(const lora_call *call, lora_chunk chunk, int slice, int first, int end,
                             lora_worker *worker) {
#if HAS_LORA_TILES
    if (chunk.site->format >= LORA_TILES) {
        lora_expand_in_tiles(call, chunk, slice, first, end, worker);
        return;
    }
#endif
    (void)worker;
    lora_expand(call, chunk, slice, first, end);
}

/* What lies in [from, to) of a phase's work; returns the cost of all of it. Two shares that meet at a mark
 * agree on which columns lie before it. */
static int64_t lora_run(const lora_call *call, int is_expand, int64_t from, int64_t to,
                        lora_worker *worker) {
    const lora_step *step = call->step;
    int64_t at = 0;
    for (int g = 0; g < step->num_groups; g++) {
        lora_chunk chunk = {.site = step->sites[g] + call->site_index};
        const lora_site *site = chunk.site;
        if (site->rank_total == 0) continue;
        const int most = site->format >= LORA_TILES ? LORA_TILE : LORA_CHUNK;
        for (chunk.begin = step->begins[g]; chunk.begin < step->begins[g + 1]; chunk.begin = chunk.end) {
            chunk.end = chunk.begin + most;
            if (chunk.end > step->begins[g + 1]) chunk.end = step->begins[g + 1];
            for (int s = 0; s < (is_expand ? LORA_SLICES : 1); s++) {
                if (is_expand && site->rank[s] == 0) continue;
                const lora_share share = is_expand ? lora_expand_share(call, chunk, s)
                                                   : lora_shrink_share(call, chunk);
                const int first = lora_cut(at, share, from), end = lora_cut(at, share, to);
                at += share.cost * share.columns;
                if (first >= end) continue;
                if (chunk.end == step->begins[g + 1] && g + 1 < step->num_groups) {
                    const lora_site *next = step->sites[g + 1] + call->site_index;
                    lora_fetch(is_expand ? next->b[0] : next->a, LORA_AHEAD);
                }
                if (is_expand)
                    lora_expand_some(call, chunk, s, first, end, worker);
                else
                    lora_shrink_some(call, chunk, share, first, end, worker);
            }
        }
    }
    return at;
}

/* A phase, cut into shares of the same cost. */
typedef struct {
    const lora_call *call;
    int64_t cost;
    int64_t num_shares;
    int is_expand;
} lora_job;

static void lora_take_shares(void *context, pool_share *share, int64_t item, int32_t thread) {
    const lora_job job = *(const lora_job *)context;
    const lora_step *step = job.call->step;
    lora_worker worker = {
        .wide = step->wide + (size_t)thread * LORA_CHUNK * (size_t)step->wide_stride};
    for (; item >= 0; item = pool_next(share))
        lora_run(job.call, job.is_expand, job.cost * item / job.num_shares,
                 job.cost * (item + 1) / job.num_shares, &worker);
    lora_tiles_release(&worker.shape);
}

static void lora_forward(const lora_call *call) {
    const lora_step *step = call->step;
    const int64_t shrink = lora_run(call, 0, 0, 0, NULL), expand = lora_run(call, 1, 0, 0, NULL);
    const int is_shared = step->num_threads > 1 && shrink + expand >= LORA_MIN_SHARED;
    /* More shares than threads: who comes late takes less. */
    const int64_t num_shares = is_shared ? 2 * step->num_threads : 1;
    lora_job job = {call, shrink, num_shares, 0};
    pool_run(lora_take_shares, &job, num_shares, step->num_threads);
    job = (lora_job){call, expand, num_shares, 1};
    pool_run(lora_take_shares, &job, num_shares, step->num_threads);
}

/* Whether weights may be laid out for matrix tiles here. */
int32_t lora_has_tiles(void) {
#if HAS_LORA_TILES
    return amx_allow();
#else
    return 0;
#endif
}

/* How many planes of bf16 hold these fp32 weights; see lora_planes_of. */
int32_t lora_count_planes(const void *weights, int64_t count) {
    return lora_planes_of(weights, (size_t)count);
}

/* One slice's a, or b, into its place in zeroed memory; see lora_lay_out. weights: bf16 or fp32. */
void lora_pack_tiles(uint16_t *to, const void *weights, int32_t is_bf16, int32_t planes,
                     int64_t num_rows, int64_t num_columns, int64_t begin, int64_t total_rows,
                     int64_t depth) {
    lora_lay_out(to, weights, is_bf16, (size_t)planes, (size_t)num_rows, (size_t)num_columns,
                 (size_t)begin, (size_t)total_rows, (size_t)depth);
}

/* Add the deltas of one site to y, in place. x and y are (rows, num_inputs) and (rows, num_outputs),
 * contiguous, both bf16 or both fp32. slice_begin has LORA_SLICES + 1 offsets into a row of y. */
void lora_add(void *y, const void *x, int32_t is_bf16, int32_t num_inputs, int32_t num_outputs,
              const int32_t *slice_begin, int32_t site_index, const lora_step *step) {
    const lora_call call = {step, y, x, NULL, slice_begin, num_inputs, num_outputs, is_bf16, site_index};
    lora_forward(&call);
}

/* Add the deltas of the embedding to y (rows, num_outputs), in place; token_ids has an id per row. */
void lora_embed(void *y, const int64_t *token_ids, int32_t y_is_bf16, int32_t num_outputs,
                int32_t site_index, const lora_step *step) {
    const int32_t slice_begin[] = {0, num_outputs, num_outputs, num_outputs};
    const lora_call call = {step, y, NULL, token_ids, slice_begin, 0, num_outputs, y_is_bf16, site_index};
    lora_forward(&call);
}
