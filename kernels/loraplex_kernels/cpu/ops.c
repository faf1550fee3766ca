/* What a decoder does between its products: norms, residual additions, the gated activation, rotation.
 *
 * Row rule: every row is computed alone, with one order of additions that depends on its width only, so a row
 * gets the same bits whatever rows share the call and whichever thread takes it. Nothing reads a row that it
 * does not write, but for gathered rows.
 *
 * x, y, weights and outputs are all fp32 or all bf16. Arithmetic is fp32. Where a value would be stored between
 * two operations of transformers' Llama (the sum of the residual, the normalised row before its weight, each
 * product of a rotation) it is rounded to the model's dtype, so that additions and rotations have the very
 * bits of torch; the activation is rounded once. AVX-512 takes sixteen numbers at once, with the bits of eight.
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "calls.h"
#include "pool.h"
#include "simd.h"
#include "v16.h"

ops_rms_norm_call ops_rms_norm;
ops_gated_call ops_gated;
ops_rotate_and_write_call ops_rotate_and_write;

/* Threads share a call of at least so many numbers, which take one of them 20 to 50 us: to wake a thread and to
 * wait for it takes about as long. */
#define OPS_GRAIN 49152

INLINE v8 ops_load(const void *from, size_t at, int is_bf16) {
    return is_bf16 ? v8_load_bf16((const uint16_t *)from + at) : v8_load((const float *)from + at);
}

/* The first `count` of eight numbers, zeros behind them. */
INLINE v8 ops_load_part(const void *from, size_t at, int count, int is_bf16) {
    float lane[8] = {0};
    for (int i = 0; i < count; i++)
        lane[i] = is_bf16 ? widen_bf16(((const uint16_t *)from)[at + (size_t)i])
                          : ((const float *)from)[at + (size_t)i];
    return v8_load(lane);
}

INLINE void ops_store(void *to, size_t at, v8 value, int is_bf16) {
    if (is_bf16)
        v8_store_bf16((uint16_t *)to + at, value);
    else
        v8_store((float *)to + at, value);
}

INLINE void ops_store_part(void *to, size_t at, v8 value, int count, int is_bf16) {
    float lane[8];
    v8_store(lane, value);
    for (int i = 0; i < count; i++) {
        if (is_bf16)
            ((uint16_t *)to)[at + (size_t)i] = narrow_bf16(lane[i]);
        else
            ((float *)to)[at + (size_t)i] = lane[i];
    }
}

/* As it would be read back after storing it. */
INLINE v8 ops_rounded(v8 value, int is_bf16) {
    if (!is_bf16) return value;
    uint16_t bits[8];
    v8_store_bf16(bits, value);
    return v8_load_bf16(bits);
}

#if HAS_V16
INLINE v16 ops_load_wide(const void *from, size_t at, int is_bf16) {
    return is_bf16 ? v16_load_bf16((const uint16_t *)from + at)
                   : v16_load((const float *)from + at);
}

INLINE void ops_store_wide(void *to, size_t at, v16 value, int is_bf16) {
    if (is_bf16)
        v16_store_bf16((uint16_t *)to + at, value);
    else
        v16_store((float *)to + at, value);
}

INLINE v16 ops_rounded_wide(v16 value, int is_bf16) {
    return is_bf16 ? v16_round_bf16(value) : value;
}
#endif

/* 1 / sqrt(mean of squares + eps) of a row; first adds y to it where there is one. Squares are summed by
 * position modulo 32 in order, then in one tree; a last part of fewer than 8 counts as if zeros followed. */
INLINE float ops_scale(void *x, const void *y, int64_t width, float eps, int is_bf16) {
    v8 sum[4] = {v8_zero(), v8_zero(), v8_zero(), v8_zero()};
    int64_t d = 0;
    int lane = 0;
#if HAS_V16
    v16 wide[2] = {v16_zero(), v16_zero()};
    for (; d + 32 <= width; d += 32) {
        for (int i = 0; i < 2; i++) {
            const size_t at = (size_t)d + 16 * (size_t)i;
            v16 value = ops_load_wide(x, at, is_bf16);
            if (y) {
                value = ops_rounded_wide(v16_add(value, ops_load_wide(y, at, is_bf16)), is_bf16);
                ops_store_wide(x, at, value, is_bf16);
            }
            wide[i] = v16_fma(value, value, wide[i]);
        }
    }
    for (int i = 0; i < 2; i++) {
        sum[2 * i] = v16_low(wide[i]);
        sum[2 * i + 1] = v16_high(wide[i]);
    }
#endif
    for (; d + 8 <= width; d += 8, lane = (lane + 1) & 3) {
        v8 value = ops_load(x, (size_t)d, is_bf16);
        if (y) {
            value = ops_rounded(v8_add(value, ops_load(y, (size_t)d, is_bf16)), is_bf16);
            ops_store(x, (size_t)d, value, is_bf16);
        }
        sum[lane] = v8_fma(value, value, sum[lane]);
    }
    if (d < width) {
        const int count = (int)(width - d);
        v8 value = ops_load_part(x, (size_t)d, count, is_bf16);
        if (y) {
            value = v8_add(value, ops_load_part(y, (size_t)d, count, is_bf16));
            value = ops_rounded(value, is_bf16);
            ops_store_part(x, (size_t)d, value, count, is_bf16);
        }
        sum[lane] = v8_fma(value, value, sum[lane]);
    }
    const float total = v8_total(v8_add(v8_add(sum[0], sum[1]), v8_add(sum[2], sum[3])));
    return 1.0f / sqrtf(total / (float)width + eps);
}

INLINE void ops_norm_row(void *x, const void *y, const void *weight, void *out, int64_t width,
                         float eps, int is_bf16) {
    const float factor = ops_scale(x, y, width, eps, is_bf16);
    const v8 scale = v8_all(factor);
    int64_t d = 0;
#if HAS_V16
    for (; d + 16 <= width; d += 16) {
        v16 value = v16_mul(ops_load_wide(x, (size_t)d, is_bf16), v16_all(factor));
        value = ops_rounded_wide(value, is_bf16);
        ops_store_wide(out, (size_t)d, v16_mul(value, ops_load_wide(weight, (size_t)d, is_bf16)),
                       is_bf16);
    }
#endif
    for (; d + 8 <= width; d += 8) {
        const v8 value = ops_rounded(v8_mul(ops_load(x, (size_t)d, is_bf16), scale), is_bf16);
        ops_store(out, (size_t)d, v8_mul(value, ops_load(weight, (size_t)d, is_bf16)), is_bf16);
    }
    if (d < width) {
        const int count = (int)(width - d);
        const v8 value =
            ops_rounded(v8_mul(ops_load_part(x, (size_t)d, count, is_bf16), scale), is_bf16);
        ops_store_part(out, (size_t)d, v8_mul(value, ops_load_part(weight, (size_t)d, count, is_bf16)),
                       count, is_bf16);
    }
}

static void ops_norm_row_fp32(void *x, const void *y, const void *weight, void *out, int64_t width,
                              float eps) {
    ops_norm_row(x, y, weight, out, width, eps, 0);
}

static void ops_norm_row_bf16(void *x, const void *y, const void *weight, void *out, int64_t width,
                              float eps) {
    ops_norm_row(x, y, weight, out, width, eps, 1);
}

typedef struct {
    void *x;
    const int64_t *row;
    const void *y, *weight;
    void *out;
    int64_t num_rows, width, item_rows;
    float eps;
    int32_t is_bf16;
} ops_norm_job;

static void ops_norm_share(void *context, pool_share *share, int64_t item, int32_t thread) {
    const ops_norm_job job = *(const ops_norm_job *)context;
    const size_t row_bytes = (size_t)job.width * (job.is_bf16 ? 2 : 4);
    (void)thread;
    for (; item >= 0; item = pool_next(share)) {
        const int64_t end = pool_item_end(item, job.item_rows, job.num_rows);
        for (int64_t r = item * job.item_rows; r < end; r++) {
            void *own = (char *)job.x + (size_t)(job.row ? job.row[r] : r) * row_bytes;
            const void *added = job.y ? (const char *)job.y + (size_t)r * row_bytes : NULL;
            void *to = (char *)job.out + (size_t)r * row_bytes;
            if (job.is_bf16)
                ops_norm_row_bf16(own, added, job.weight, to, job.width, job.eps);
            else
                ops_norm_row_fp32(own, added, job.weight, to, job.width, job.eps);
        }
    }
}

/* out[r] = norm(x[row ? row[r] : r]), each row first increased by y[r] in place where there is a y. No `row`
 * comes twice with y. All are contiguous, `width` numbers a row. */
void ops_rms_norm(void *x, const int64_t *row, const void *y, const void *weight, void *out,
                  int64_t num_rows, int64_t width, float eps, int32_t is_bf16,
                  int32_t num_threads) {
    const int32_t threads = num_rows * width >= OPS_GRAIN ? num_threads : 1;
    ops_norm_job job = {x,     row,      y,     weight,  out, num_rows,
                        width, pool_item_rows(num_rows, threads), eps, is_bf16};
    pool_run(ops_norm_share, &job, pool_num_items(num_rows, job.item_rows), threads);
}

INLINE void ops_gated_row(const void *gate, const void *up, void *out, int64_t width, int is_bf16) {
    int64_t d = 0;
#if HAS_V16
    for (; d + 16 <= width; d += 16) {
        const v16 g = ops_load_wide(gate, (size_t)d, is_bf16);
        const v16 silu = v16_mul(g, v16_sigmoid(g));
        ops_store_wide(out, (size_t)d, v16_mul(silu, ops_load_wide(up, (size_t)d, is_bf16)),
                       is_bf16);
    }
#endif
    for (; d + 8 <= width; d += 8) {
        const v8 g = ops_load(gate, (size_t)d, is_bf16);
        const v8 silu = v8_mul(g, v8_sigmoid(g));
        ops_store(out, (size_t)d, v8_mul(silu, ops_load(up, (size_t)d, is_bf16)), is_bf16);
    }
    if (d < width) {
        const int count = (int)(width - d);
        const v8 g = ops_load_part(gate, (size_t)d, count, is_bf16);
        const v8 silu = v8_mul(g, v8_sigmoid(g));
        ops_store_part(out, (size_t)d, v8_mul(silu, ops_load_part(up, (size_t)d, count, is_bf16)),
                       count, is_bf16);
    }
}

static void ops_gated_row_fp32(const void *gate, const void *up, void *out, int64_t width) {
    ops_gated_row(gate, up, out, width, 0);
}

static void ops_gated_row_bf16(const void *gate, const void *up, void *out, int64_t width) {
    ops_gated_row(gate, up, out, width, 1);
}

typedef struct {
    const void *gate_up;
    void *out;
    int64_t num_rows, width, item_rows;
    int32_t is_bf16;
} ops_gated_job;

static void ops_gated_share(void *context, pool_share *share, int64_t item, int32_t thread) {
    const ops_gated_job job = *(const ops_gated_job *)context;
    const size_t row_bytes = (size_t)job.width * (job.is_bf16 ? 2 : 4);
    (void)thread;
    for (; item >= 0; item = pool_next(share)) {
        const int64_t end = pool_item_end(item, job.item_rows, job.num_rows);
        for (int64_t r = item * job.item_rows; r < end; r++) {
            const char *gate = (const char *)job.gate_up + 2 * (size_t)r * row_bytes;
            char *to = (char *)job.out + (size_t)r * row_bytes;
            if (job.is_bf16)
                ops_gated_row_bf16(gate, gate + row_bytes, to, job.width);
            else
                ops_gated_row_fp32(gate, gate + row_bytes, to, job.width);
        }
    }
}

/* out = silu(gate) * up; gate_up: (rows, 2 * width), all gates of a row, then its ups. */
void ops_gated(const void *gate_up, void *out, int64_t num_rows, int64_t width, int32_t is_bf16,
               int32_t num_threads) {
    const int32_t threads = num_rows * width >= OPS_GRAIN ? num_threads : 1;
    ops_gated_job job = {gate_up, out, num_rows, width, pool_item_rows(num_rows, threads), is_bf16};
    pool_run(ops_gated_share, &job, pool_num_items(num_rows, job.item_rows), threads);
}

/* One head: x[i] * cos[i] + x[i + half] * sin[i], and the other half with the halves swapped; every product and
 * sum rounded, as torch does. Elementwise, so the compiler may use what vectors it likes. */
INLINE void ops_rotate_head_fp32(float *x, const float *cos, const float *sin, int half) {
    for (int i = 0; i < half; i++) {
        const float low = x[i], high = x[i + half];
        x[i] = low * cos[i] + high * sin[i];
        x[i + half] = high * cos[i + half] + low * sin[i + half];
    }
}

INLINE uint16_t ops_rotated_bf16(uint16_t own, uint16_t cos, uint16_t other, uint16_t sin) {
    const uint16_t a = narrow_bf16(widen_bf16(own) * widen_bf16(cos));
    const uint16_t b = narrow_bf16(widen_bf16(other) * widen_bf16(sin));
    return narrow_bf16(widen_bf16(a) + widen_bf16(b));
}

#if HAS_V16
INLINE v16 ops_rotated_wide(v16 own, const uint16_t *cos, v16 other, const uint16_t *sin) {
    const v16 a = v16_round_bf16(v16_mul(own, v16_load_bf16(cos)));
    const v16 b = v16_round_bf16(v16_mul(other, v16_load_bf16(sin)));
    return v16_add(a, b);
}
#endif

INLINE void ops_rotate_head_bf16(uint16_t *x, const uint16_t *cos, const uint16_t *sin, int half) {
    int i = 0;
#if HAS_V16
    for (; i + 16 <= half; i += 16) {
        const v16 low = v16_load_bf16(x + i), high = v16_load_bf16(x + i + half);
        v16_store_bf16(x + i, ops_rotated_wide(low, cos + i, high, sin + i));
        v16_store_bf16(x + i + half, ops_rotated_wide(high, cos + i + half, low, sin + i + half));
    }
#endif
    for (; i < half; i++) {
        const uint16_t low = x[i], high = x[i + half];
        x[i] = ops_rotated_bf16(low, cos[i], high, sin[i]);
        x[i + half] = ops_rotated_bf16(high, cos[i + half], low, sin[i + half]);
    }
}

typedef struct {
    char *qkv;
    const void *cos, *sin;
    char *kv;
    const int64_t *slot;
    size_t q_bytes, kv_bytes;
    int64_t num_tokens, item_tokens;
    int32_t num_rotated, head_dim;
    int32_t is_bf16;
} ops_rotate_job;

static void ops_rotate_share(void *context, pool_share *share, int64_t item, int32_t thread) {
    const ops_rotate_job job = *(const ops_rotate_job *)context;
    const int half = job.head_dim / 2;
    (void)thread;
    for (; item >= 0; item = pool_next(share)) {
        const int64_t end = pool_item_end(item, job.item_tokens, job.num_tokens);
        for (int64_t t = item * job.item_tokens; t < end; t++) {
            char *row = job.qkv + (size_t)t * (job.q_bytes + job.kv_bytes);
            const size_t at = (size_t)t * (size_t)job.head_dim;
            for (int h = 0; h < job.num_rotated; h++) {
                const size_t head = (size_t)h * (size_t)job.head_dim;
                if (job.is_bf16)
                    ops_rotate_head_bf16((uint16_t *)row + head, (const uint16_t *)job.cos + at,
                                         (const uint16_t *)job.sin + at, half);
                else
                    ops_rotate_head_fp32((float *)row + head, (const float *)job.cos + at,
                                         (const float *)job.sin + at, half);
            }
            memcpy(job.kv + (size_t)job.slot[t] * job.kv_bytes, row + job.q_bytes, job.kv_bytes);
        }
    }
}

/* Rotates the queries and keys of a step's merged rows in place and copies keys and values to their slots.
 *
 * qkv: (rows, (num_heads + 2 * num_kv_heads) * head_dim); cos and sin: (rows, head_dim), sin with the sign of
 * the rotated half; kv: (slots, 2 * num_kv_heads * head_dim); slot: of each of the num_tokens first rows. */
void ops_rotate_and_write(void *qkv, const void *cos, const void *sin, void *kv,
                          const int64_t *slot, int64_t num_tokens, int32_t num_heads,
                          int32_t num_kv_heads, int32_t head_dim, int32_t is_bf16,
                          int32_t num_threads) {
    const size_t size = is_bf16 ? 2 : 4;
    const int32_t num_rotated = num_heads + num_kv_heads;
    const int32_t threads = num_tokens * num_rotated * head_dim >= OPS_GRAIN ? num_threads : 1;
    ops_rotate_job job = {
        .qkv = qkv,
        .cos = cos,
        .sin = sin,
        .kv = kv,
        .slot = slot,
        .q_bytes = (size_t)num_heads * (size_t)head_dim * size,
        .kv_bytes = 2 * (size_t)num_kv_heads * (size_t)head_dim * size,
        .num_tokens = num_tokens,
        .item_tokens = pool_item_rows(num_tokens, threads),
        .num_rotated = num_rotated,
        .head_dim = head_dim,
        .is_bf16 = is_bf16,
    };
    pool_run(ops_rotate_share, &job, pool_num_items(num_tokens, job.item_tokens), threads);
}
