/* Which vocabulary ids top-k and top-p leave: the few that count are found and sorted, not all.
 *
 * Reference: loraplex_engine.sampling.filters, whose ids these are, in its order. Where its rounding could decide
 * otherwise than ours (a sum as good as equal to p), and where too many ids are left to gain anything, nothing is
 * said and the reference decides: the outcome is the same with and without this file.
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "simd.h"
#include "v16.h"

/* Scaled logits are the reference's to the bit; its exponentials in fp32 err by at most 2.6 ulp of 2^-23, ours by 2,
 * so that two sums of them differ by at most 6e-7 of either. */
#define CUT_UNSURE 1e-6
/* First all within this of the highest, of scaled logits; then within twice as much, as long as that is too few. */
#define CUT_FIRST 4.0f
#define CUT_LAST 64.0f

typedef struct {
    uint32_t key; /* ascending: the highest first */
    uint32_t id;
} cut_item;

INLINE uint32_t cut_key(float value) {
    uint32_t bits;
    value += 0.0f; /* of both zeros one */
    memcpy(&bits, &value, sizeof bits);
    return bits & 0x80000000u ? bits : ~bits & 0x7fffffffu;
}

/* By key, stable: equal ones stay in order of ids. `other` is as long. */
static void cut_sort(cut_item *items, cut_item *other, int64_t count) {
    for (int shift = 0; shift < 32; shift += 8) {
        int64_t begin[257] = {0};
        for (int64_t i = 0; i < count; i++) begin[(items[i].key >> shift & 255) + 1]++;
        for (int b = 0; b < 256; b++) begin[b + 1] += begin[b];
        for (int64_t i = 0; i < count; i++) other[begin[items[i].key >> shift & 255]++] = items[i];
        cut_item *last = items;
        items = other;
        other = last;
    }
}

/* scaled[i] = (scores[i] - highest) / temperature, as fp32 rounds it; returns the sum of e^scaled. */
static double cut_scale(const float *scores, int64_t size, float highest, float temperature,
                        float *scaled) {
    double sum[8] = {0};
    float part[16];
    int64_t i = 0;
#if HAS_V16
    for (; i + 16 <= size; i += 16) {
        const v16 below = v16_sub(v16_load(scores + i), v16_all(highest));
        const v16 value = v16_div(below, v16_all(temperature));
        v16_store(scaled + i, value);
        v16_store(part, v16_exp(value));
        for (int j = 0; j < 8; j++) sum[j] += (double)part[j] + (double)part[j + 8];
    }
#endif
    for (; i + 8 <= size; i += 8) {
        const v8 value =
            v8_div(v8_sub(v8_load(scores + i), v8_all(highest)), v8_all(temperature));
        v8_store(scaled + i, value);
        v8_store(part, v8_exp(value));
        for (int j = 0; j < 8; j++) sum[j] += (double)part[j];
    }
    for (; i < size; i++) {
        scaled[i] = (scores[i] - highest) / temperature;
        sum[0] += (double)v8_exp_one(scaled[i]);
    }
    double total = 0.0;
    for (int j = 0; j < 8; j++) total += sum[j];
    return total;
}

/* How many of `scaled` are `least` or more. */
static int64_t cut_count(const float *scaled, int64_t size, float least) {
    int64_t count = 0;
    for (int64_t first = 0; first < size; first += 65536) {
        const int64_t stop = first + 65536 < size ? first + 65536 : size;
        int32_t own = 0;
        for (int64_t i = first; i < stop; i++) own += scaled[i] >= least;
        count += own;
    }
    return count;
}

/* Those, as items in order of ids. */
static int64_t cut_collect(const float *scores, const float *scaled, int64_t size, float least,
                           cut_item *items) {
    int64_t count = 0;
    for (int64_t first = 0; first < size; first += 32) {
        const int64_t stop = first + 32 < size ? first + 32 : size;
        int any = 0;
        for (int64_t i = first; i < stop; i++) any |= scaled[i] >= least;
        if (!any) continue;
        for (int64_t i = first; i < stop; i++)
            if (scaled[i] >= least) items[count++] = (cut_item){cut_key(scores[i]), (uint32_t)i};
    }
    return count;
}

/* The share of `total` that each of the sorted items and all before it have, up to the first that reaches top_p: how
 * many those are. 0: no sum does; -1: not sure.
 *
 * is_all: there are no others, so that the last is the last whatever it reaches. */
static int64_t cut_reach(const cut_item *items, int64_t count, const float *scores, double highest,
                         double temperature, double total, double top_p, int is_all) {
    double sum = 0.0;
    for (int64_t i = 0; i < count; i++) {
        if (is_all && i + 1 == count) return count;
        sum += exp(((double)scores[items[i].id] - highest) / temperature) / total;
        if (fabs(sum - top_p) <= CUT_UNSURE) return -1;
        if (sum > top_p) return i + 1;
    }
    return 0;
}

/* Writes the ids that stay, most likely first, of equals the lowest first, and returns how many; -1: see above.
 *
 * scores: `size` finite numbers or minus infinity, at most 2^31; highest: the highest of them, finite.
 * top_k: 0: any number; else below `size`. top_p: 1 or more: any.
 * scaled: `size` floats, items: 2 * capacity, to work in. */
int64_t cut_kept(const float *scores, int64_t size, float highest, double temperature,
                 int64_t top_k, double top_p, float *scaled, cut_item *items, int64_t capacity,
                 int64_t *ids) {
    double total = cut_scale(scores, size, highest, (float)temperature, scaled);
    for (float within = CUT_FIRST; within <= CUT_LAST; within *= 2) {
        int64_t count = cut_count(scaled, size, -within);
        if (count > capacity) return -1;
        if (count < top_k) continue;
        count = cut_collect(scores, scaled, size, -within, items);
        cut_sort(items, items + capacity, count);
        if (top_k) {
            count = top_k;
            total = 0.0;
            for (int64_t i = 0; i < count; i++)
                total += (double)v8_exp_one(scaled[items[i].id]);
        }
        int64_t kept = count;
        if (top_p < 1.0)
            kept = cut_reach(items, count, scores, highest, temperature, total, top_p,
                             top_k > 0 || count == size);
        if (kept < 0) return -1;
        if (kept == 0) continue;
        for (int64_t i = 0; i < kept; i++) ids[i] = items[i].id;
        return kept;
    }
    return -1;
}
