/* The best id of each row of logits, and whether all of the row is finite: one pass, no copies.
 *
 * The best is the first of the highest. Of a row with NaN or an infinity only that is said: its best means
 * nothing. Rows are fp32 or bf16, contiguous, and scanned in blocks: a block whose highest is above all before it is
 * remembered and looked through once more at the end.
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>

#include "pool.h"
#include "simd.h"
#include "v16.h"

#define SCAN_BLOCK 1024
/* Threads share so many numbers or more, which take one of them 100 to 200 us: who waits for a thread that has no CPU
 * of its own just then waits for longer than that. */
#define SCAN_GRAIN 1048576

INLINE float scan_at(const void *row, int64_t at, int is_bf16) {
    return is_bf16 ? widen_bf16(((const uint16_t *)row)[at]) : ((const float *)row)[at];
}

INLINE v8 scan_load(const void *row, int64_t at, int is_bf16) {
    return is_bf16 ? v8_load_bf16((const uint16_t *)row + at) : v8_load((const float *)row + at);
}

/* A block's highest, and whether all of it is finite, of 32 bf16 at once: as integers, which are ordered as the
 * numbers are once the bits of negative ones are turned round. */
#if HAS_V16
INLINE float scan_block_bf16(const uint16_t *row, int64_t count, int *is_finite) {
    const __m512i magnitude = _mm512_set1_epi16(0x7fff);
    __m512i top = _mm512_set1_epi16(-32768), largest = _mm512_setzero_si512();
    for (int64_t at = 0; at < count; at += 32) {
        const __m512i bits = _mm512_loadu_si512(row + at);
        const __m512i turned = _mm512_and_si512(_mm512_srai_epi16(bits, 15), magnitude);
        top = _mm512_max_epi16(top, _mm512_xor_si512(bits, turned));
        largest = _mm512_max_epu16(largest, _mm512_and_si512(bits, magnitude));
    }
    int16_t tops[32], sizes[32], highest = -32768, size = 0;
    _mm512_storeu_si512(tops, top);
    _mm512_storeu_si512(sizes, largest);
    for (int i = 0; i < 32; i++) {
        highest = tops[i] > highest ? tops[i] : highest;
        size = sizes[i] > size ? sizes[i] : size;
    }
    *is_finite &= size < 0x7f80;
    return widen_bf16((uint16_t)(highest ^ ((highest >> 15) & 0x7fff)));
}
#endif

INLINE void scan_row(const void *row, int64_t width, int is_bf16, int64_t *best,
                     uint8_t *is_finite) {
    float highest = -INFINITY, rest = 0.0f;
    int64_t block = 0;
    int is_whole = 1; /* no block looked at as integers had one that is not finite */
    /* Zero times a finite number is zero, times anything else NaN, which then stays. */
    v8 zeros[2] = {v8_zero(), v8_zero()};
    const v8 zero = v8_zero();
    for (int64_t first = 0; first < width; first += SCAN_BLOCK) {
        const int64_t stop = first + SCAN_BLOCK < width ? first + SCAN_BLOCK : width;
#if HAS_V16
        if (is_bf16 && (stop - first) % 32 == 0) {
            const float own =
                scan_block_bf16((const uint16_t *)row + first, stop - first, &is_whole);
            if (own > highest) {
                highest = own;
                block = first;
            }
            continue;
        }
#endif
        v8 top[2] = {v8_all(-INFINITY), v8_all(-INFINITY)};
        int64_t at = first;
        for (; at + 16 <= stop; at += 16) {
            for (int i = 0; i < 2; i++) {
                const v8 value = scan_load(row, at + 8 * i, is_bf16);
                top[i] = v8_max(value, top[i]);
                zeros[i] = v8_fma(value, zero, zeros[i]);
            }
        }
        float own = v8_top(v8_max(top[0], top[1]));
        for (; at < stop; at++) {
            const float value = scan_at(row, at, is_bf16);
            own = value > own ? value : own;
            rest = fmaf(value, 0.0f, rest);
        }
        if (own > highest) {
            highest = own;
            block = first;
        }
    }
    const float sum = v8_total(v8_add(zeros[0], zeros[1])) + rest;
    *is_finite = is_whole && sum == sum;
    *best = 0;
    if (*is_finite) {
        while (scan_at(row, block, is_bf16) != highest) block++;
        *best = block;
    }
}

static void scan_row_fp32(const void *row, int64_t width, int64_t *best, uint8_t *is_finite) {
    scan_row(row, width, 0, best, is_finite);
}

static void scan_row_bf16(const void *row, int64_t width, int64_t *best, uint8_t *is_finite) {
    scan_row(row, width, 1, best, is_finite);
}

typedef struct {
    const void *logits;
    int64_t num_rows, width, stride, item_rows;
    int64_t *best;
    uint8_t *is_finite;
    int32_t is_bf16;
} scan_job;

static void scan_share(void *context, pool_share *share, int64_t item, int32_t thread) {
    const scan_job job = *(const scan_job *)context;
    (void)thread;
    for (; item >= 0; item = pool_next(share)) {
        const int64_t end = pool_item_end(item, job.item_rows, job.num_rows);
        for (int64_t r = item * job.item_rows; r < end; r++) {
            if (job.is_bf16)
                scan_row_bf16((const uint16_t *)job.logits + r * job.stride, job.width, job.best + r,
                              job.is_finite + r);
            else
                scan_row_fp32((const float *)job.logits + r * job.stride, job.width, job.best + r,
                              job.is_finite + r);
        }
    }
}

/* logits: `num_rows` rows of `width` numbers, `stride` numbers apart; best and is_finite: one a row. */
void scan_rows(const void *logits, int64_t num_rows, int64_t width, int64_t stride,
               int32_t is_bf16, int64_t *best, uint8_t *is_finite, int32_t num_threads) {
    const int32_t threads = num_rows * width >= SCAN_GRAIN ? num_threads : 1;
    scan_job job = {logits, num_rows, width, stride, pool_item_rows(num_rows, threads), best, is_finite, is_bf16};
    pool_run(scan_share, &job, pool_num_items(num_rows, job.item_rows), threads);
}
