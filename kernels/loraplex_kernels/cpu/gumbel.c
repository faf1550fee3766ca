/* Which vocabulary ids can win a Gumbel-max draw: noise for all of them, logarithms for a handful.
 *
 * Noise of id v is -log(-log((word + 0.5) / 2^32)), word v % 4 of Philox4x32-10 with key = seed and counter =
 * (v / 4, position low, position high, 0); reference: loraplex_engine.sampling.noise. What is returned is a
 * superset of the ids whose score logit / temperature + noise is the highest: the caller computes those
 * scores itself, so the winner does not depend on how this file rounds.
 *
 * A bound that needs no logarithm: with u = (word + 0.5) / 2^32, noise n has 1 - u = 1 - exp(-exp(-n)) <=
 * exp(-n), so n <= -ln(1 - u), and of 1 - u = (~word + 0.5) / 2^32 the leading zeros are enough.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "simd.h"

#define LANES 16
#define LN2 0.6931471805599453
/* Far more than the rounding of any score here, far less than would let many more ids through. */
#define SLACK 1e-3

static void philox_blocks(uint64_t first, uint64_t seed, uint64_t position, uint32_t words[4][LANES]) {
    uint32_t *c0 = words[0], *c1 = words[1], *c2 = words[2], *c3 = words[3];
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int i = 0; i < LANES; i++) {
        c0[i] = (uint32_t)(first + (uint64_t)i);
        c1[i] = (uint32_t)position;
        c2[i] = (uint32_t)(position >> 32);
        c3[i] = 0;
    }
    for (int round = 0; round < 10; round++) {
        for (int i = 0; i < LANES; i++) {
            uint64_t p0 = (uint64_t)0xD2511F53u * c0[i], p1 = (uint64_t)0xCD9E8D57u * c2[i];
            uint32_t next0 = (uint32_t)(p1 >> 32) ^ c1[i] ^ k0, next2 = (uint32_t)(p0 >> 32) ^ c3[i] ^ k1;
            c1[i] = (uint32_t)p1;
            c3[i] = (uint32_t)p0;
            c0[i] = next0;
            c2[i] = next2;
        }
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
}

/* Sets bit i of the answer where id first + i might reach `least`, of (score - highest) / temperature + noise.
 *
 * In fp32, and with a step of the bound more than there is: none is lost, and most that are out are told. */
static uint64_t gumbel_possible(const float *scores, const uint32_t words[4][LANES], float highest,
                                float inverse, float least) {
    uint8_t is_possible[4 * LANES];
    uint32_t word[4 * LANES];
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < 4; j++) word[4 * i + j] = words[j][i];
    for (int i = 0; i < 4 * LANES; i++) {
        /* The exponent of the upper 24 bits, which fp32 holds, is 23 less their leading zeros. */
        const float upper = (float)(int32_t)(~word[i] >> 8);
        uint32_t bits;
        memcpy(&bits, &upper, sizeof bits);
        const int32_t exponent = (int32_t)(bits >> 23) - 127;
        const float zeros = exponent < 0 ? 32.0f : (float)(23 - exponent);
        const float bound = (scores[i] - highest) * inverse + (zeros + 2.0f) * (float)LN2;
        is_possible[i] = bound >= least;
    }
    uint8_t any = 0;
    for (int i = 0; i < 4 * LANES; i++) any |= is_possible[i];
    uint64_t found = 0;
    if (any)
        for (int i = 0; i < 4 * LANES; i++) found |= (uint64_t)is_possible[i] << i;
    return found;
}

/* The highest of 4 * LANES scores, none of which is NaN. */
static float gumbel_highest(const float *scores) {
    v8 top = v8_load(scores);
    for (int i = 8; i < 4 * LANES; i += 8) top = v8_max(top, v8_load(scores + i));
    return v8_largest(top);
}

/* Writes ascending ids into `ids` and returns how many; -1: there are more than `capacity`.
 *
 * scores: `size` finite numbers or minus infinity. floor: a score, relative to `highest` and divided by the
 * temperature, that some id is known to reach.
 */
int64_t gumbel_survivors(const float *scores, int64_t size, double highest, double temperature,
                         uint64_t seed, uint64_t position, double floor, int64_t capacity,
                         int64_t *ids) {
    uint32_t words[4][LANES];
    const double most_noise = 33 * LN2, inverse = 1 / temperature;
    int64_t count = 0;
    for (int64_t first = 0; first < size; first += 4 * LANES) {
        int64_t stop = first + 4 * LANES < size ? first + 4 * LANES : size;
        const int is_whole = stop == first + 4 * LANES;
        float best = -INFINITY;
        if (is_whole)
            best = gumbel_highest(scores + first);
        else
            for (int64_t id = first; id < stop; id++) best = scores[id] > best ? scores[id] : best;
        if ((best - highest) * inverse + most_noise < floor - SLACK) continue;
        philox_blocks((uint64_t)first / 4, seed, position, words);
        /* A last part that is not whole has all looked at. */
        uint64_t possible = ~(uint64_t)0;
        if (is_whole)
            possible = gumbel_possible(scores + first, words, (float)highest, (float)inverse,
                                       (float)floor);
        if (!possible) continue;
        for (int64_t id = first; id < stop; id++) {
            if (!(possible >> (id - first) & 1)) continue;
            uint32_t word = words[id % 4][(id - first) / 4], rest = ~word;
            int zeros = rest ? __builtin_clz(rest) : 32;
            double score = (scores[id] - highest) * inverse;
            if (score + (zeros + 1) * LN2 < floor - SLACK) continue;
            score -= log(-log((word + 0.5) * 0x1p-32));
            if (score < floor - SLACK) continue;
            if (count == capacity) return -1;
            ids[count++] = id;
            if (score > floor) floor = score;
        }
    }
    return count;
}
