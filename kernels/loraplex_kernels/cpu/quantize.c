/* Chooses weights of eight and four bits, a row (an output) at a time; what they stand for is said in panels.h.
 *
 * lost and energy: of each row the sum of squares of what rounding changed, and of the weights; not finite where a
 * weight is not.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "simd.h"

#define QUANTIZE_GROUP 32
#define QUANTIZE_VECTORS (QUANTIZE_GROUP / 8)
/* Shares of a group's range that are tried at either end: to cut off an extreme weight makes all others finer. */
static const float quantize_shares[] = {1.0f, 0.92f, 0.84f};
#define QUANTIZE_SHARES 3

INLINE float quantize_as_bf16(float value) { return widen_bf16(narrow_bf16(value)); }

/* weights: (rows, columns); q: (rows, columns), -127 .. 127; scale, lost, energy: (rows,). */
void quantize_int8(const float *weights, int8_t *q, float *scale, double *lost, double *energy,
                   int64_t rows, int64_t columns, int32_t num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1)
    for (int64_t r = 0; r < rows; r++) {
        const float *row = weights + r * columns;
        float top = 0.0f;
        double squares = 0.0, errors = 0.0;
        for (int64_t k = 0; k < columns; k++) {
            const float size = fabsf(row[k]);
            top = size > top ? size : top;
            squares += (double)row[k] * (double)row[k];
        }
        const float step = top / 127.0f;
        for (int64_t k = 0; k < columns; k++) {
            float level = step > 0.0f ? rintf(row[k] / step) : 0.0f;
            level = level > 127.0f ? 127.0f : level < -127.0f ? -127.0f : level;
            /* Not a number's conversion is undefined, and its row is refused. */
            q[r * columns + k] = level == level ? (int8_t)level : 0;
            const double error = (double)(level * step) - (double)row[k];
            errors += error * error;
        }
        scale[r] = step;
        lost[r] = errors;
        energy[r] = squares;
    }
}

/* The levels of a group, 0 .. 15, and the sum of squared errors. */
INLINE float quantize_try(const v8 *weight, float scale, float offset, v8 *level) {
    const v8 step = v8_all(scale != 0.0f ? scale : 1.0f);
    v8 errors = v8_zero();
    for (int v = 0; v < QUANTIZE_VECTORS; v++) {
        v8 place = v8_div(v8_sub(weight[v], v8_all(offset)), step);
        place = v8_where_less(place, v8_zero(), v8_zero(), place);
        place = v8_where_less(v8_all(15.0f), place, v8_all(15.0f), place);
        level[v] = v8_round(place);
        const v8 error =
            v8_sub(v8_fma(level[v], v8_all(scale), v8_all(offset)), weight[v]);
        errors = v8_fma(error, error, errors);
    }
    return v8_total(errors);
}

/* The last weights of a row fill up its last group: they change neither end of its range.
 * q: (rows, columns), 0 .. 15; scale, offset: (rows, groups), of values that bf16 holds; is_bf16: what they stand for
 * is rounded to bf16, which is lost too. */
void quantize_int4(const float *weights, uint8_t *q, float *scale, float *offset, double *lost,
                   double *energy, int64_t rows, int64_t columns, int32_t is_bf16,
                   int32_t num_threads) {
    const int64_t groups = (columns + QUANTIZE_GROUP - 1) / QUANTIZE_GROUP;
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1)
    for (int64_t r = 0; r < rows; r++) {
        double squares = 0.0, errors = 0.0;
        for (int64_t g = 0; g < groups; g++) {
            const int64_t begin = g * QUANTIZE_GROUP;
            const int count = columns - begin < QUANTIZE_GROUP ? (int)(columns - begin) : QUANTIZE_GROUP;
            const float *from = weights + r * columns + begin;
            float value[QUANTIZE_GROUP], low = from[0], high = from[0];
            for (int i = 0; i < QUANTIZE_GROUP; i++) {
                value[i] = from[i < count ? i : count - 1];
                low = value[i] < low ? value[i] : low;
                high = value[i] > high ? value[i] : high;
            }
            v8 weight[QUANTIZE_VECTORS], level[QUANTIZE_VECTORS];
            for (int v = 0; v < QUANTIZE_VECTORS; v++) weight[v] = v8_load(value + 8 * v);
            float best = INFINITY, best_scale = 0.0f, best_offset = 0.0f;
            for (int a = 0; a < QUANTIZE_SHARES; a++) {
                const float own_offset = quantize_as_bf16(low * quantize_shares[a]);
                for (int b = 0; b < QUANTIZE_SHARES; b++) {
                    const float own_scale =
                        quantize_as_bf16((high * quantize_shares[b] - own_offset) / 15.0f);
                    const float error = quantize_try(weight, own_scale, own_offset, level);
                    if (error < best) {
                        best = error;
                        best_scale = own_scale;
                        best_offset = own_offset;
                    }
                }
            }
            quantize_try(weight, best_scale, best_offset, level);
            float levels[QUANTIZE_GROUP];
            for (int v = 0; v < QUANTIZE_VECTORS; v++) v8_store(levels + 8 * v, level[v]);
            for (int i = 0; i < count; i++) {
                q[r * columns + begin + i] = levels[i] == levels[i] ? (uint8_t)levels[i] : 0;
                const float kept = fmaf(levels[i], best_scale, best_offset);
                const double error =
                    (double)(is_bf16 ? quantize_as_bf16(kept) : kept) - (double)value[i];
                errors += error * error;
                squares += (double)value[i] * (double)value[i];
            }
            scale[r * groups + g] = best_scale;
            offset[r * groups + g] = best_offset;
        }
        lost[r] = errors;
        energy[r] = squares;
    }
}
