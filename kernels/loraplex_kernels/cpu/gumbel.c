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
#include "v16.h"

#define LANES 16
#define LN2 0.6931471805599453
/* Far more than the rounding of any score here, far less than would let many more ids through. */
#define SLACK 1e-3

/* philox_blocks: sixteen blocks from the first, in order of ids; philox_word: of an id, counted from theirs.
 * gumbel_possible: bit i is set where id i of these might reach `least`, of (score - highest) / temperature + noise:
 * none that does is lost, and most that do not are told. */

/* In fp32, what a bound may lack of the truth where it decides anything: far more than its rounding. */
#define FP32_SLACK 1e-2f

#if HAS_V16 && defined(__AVX512CD__)
typedef struct {
    __m512i word[4]; /* of sixteen blocks each */
} philox_words;

/* The upper and lower halves of the products of all lanes with `factor`. */
INLINE __m512i philox_multiply(__m512i value, __m512i factor, __m512i *low) {
    const __mmask16 odd = 0xaaaa;
    const __m512i even_product = _mm512_mul_epu32(value, factor);
    const __m512i odd_product = _mm512_mul_epu32(_mm512_srli_epi64(value, 32), factor);
    *low = _mm512_mask_mov_epi32(even_product, odd, _mm512_slli_epi64(odd_product, 32));
    return _mm512_mask_mov_epi32(_mm512_srli_epi64(even_product, 32), odd, odd_product);
}

INLINE philox_words philox_blocks(uint64_t first, uint64_t seed, uint64_t position) {
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m512i c0 = _mm512_add_epi32(_mm512_set1_epi32((int)(uint32_t)first), lane);
    __m512i c1 = _mm512_set1_epi32((int)(uint32_t)position);
    __m512i c2 = _mm512_set1_epi32((int)(uint32_t)(position >> 32)), c3 = _mm512_setzero_si512();
    const __m512i m0 = _mm512_set1_epi64(0xD2511F53u), m1 = _mm512_set1_epi64(0xCD9E8D57u);
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; round++) {
        __m512i low0, low1;
        const __m512i high0 = philox_multiply(c0, m0, &low0);
        const __m512i high1 = philox_multiply(c2, m1, &low1);
        c0 = _mm512_xor_si512(_mm512_xor_si512(high1, c1), _mm512_set1_epi32((int)k0));
        c2 = _mm512_xor_si512(_mm512_xor_si512(high0, c3), _mm512_set1_epi32((int)k1));
        c1 = low1;
        c3 = low0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    /* From one word of sixteen blocks to the four words of four blocks. */
    const __m512i ab = _mm512_unpacklo_epi32(c0, c1), cd = _mm512_unpacklo_epi32(c2, c3);
    const __m512i ef = _mm512_unpackhi_epi32(c0, c1), gh = _mm512_unpackhi_epi32(c2, c3);
    const __m512i b0 = _mm512_unpacklo_epi64(ab, cd), b1 = _mm512_unpackhi_epi64(ab, cd);
    const __m512i b2 = _mm512_unpacklo_epi64(ef, gh), b3 = _mm512_unpackhi_epi64(ef, gh);
    const __m512i low01 = _mm512_shuffle_i32x4(b0, b1, 0x44);
    const __m512i low23 = _mm512_shuffle_i32x4(b2, b3, 0x44);
    const __m512i high01 = _mm512_shuffle_i32x4(b0, b1, 0xee);
    const __m512i high23 = _mm512_shuffle_i32x4(b2, b3, 0xee);
    return (philox_words){{_mm512_shuffle_i32x4(low01, low23, 0x88),
                           _mm512_shuffle_i32x4(low01, low23, 0xdd),
                           _mm512_shuffle_i32x4(high01, high23, 0x88),
                           _mm512_shuffle_i32x4(high01, high23, 0xdd)}};
}

INLINE uint32_t philox_word(const philox_words *words, int64_t at) {
    uint32_t word[16];
    _mm512_storeu_si512(word, words->word[at / 16]);
    return word[at % 16];
}

INLINE uint64_t gumbel_possible(const float *scores, const philox_words *words, float highest,
                                float inverse, float least) {
    uint64_t found = 0;
    for (int i = 0; i < 4; i++) {
        const __m512i rest = _mm512_xor_si512(words->word[i], _mm512_set1_epi32(-1));
        const v16 zeros = _mm512_cvtepi32_ps(_mm512_lzcnt_epi32(rest));
        const v16 noise = v16_mul(v16_add(zeros, v16_all(1.0f)), v16_all((float)LN2));
        const v16 below = v16_sub(v16_load(scores + 16 * i), v16_all(highest));
        const v16 bound = v16_add(v16_mul(below, v16_all(inverse)), noise);
        const __mmask16 some = _mm512_cmp_ps_mask(bound, v16_all(least - FP32_SLACK), _CMP_GE_OQ);
        found |= (uint64_t)some << (16 * i);
    }
    return found;
}
#else
typedef struct {
    uint32_t word[4 * LANES]; /* four of each block */
} philox_words;

static philox_words philox_blocks(uint64_t first, uint64_t seed, uint64_t position) {
    uint32_t c0[LANES], c1[LANES], c2[LANES], c3[LANES];
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
    philox_words words;
    for (int i = 0; i < LANES; i++) {
        words.word[4 * i] = c0[i];
        words.word[4 * i + 1] = c1[i];
        words.word[4 * i + 2] = c2[i];
        words.word[4 * i + 3] = c3[i];
    }
    return words;
}

INLINE uint32_t philox_word(const philox_words *words, int64_t at) { return words->word[at]; }

static uint64_t gumbel_possible(const float *scores, const philox_words *words, float highest,
                                float inverse, float least) {
    uint8_t is_possible[4 * LANES], any = 0;
    for (int i = 0; i < 4 * LANES; i++) {
        /* The exponent of the upper 24 bits, which fp32 holds, is 23 less their leading zeros. */
        const float upper = (float)(int32_t)(~words->word[i] >> 8);
        uint32_t bits;
        memcpy(&bits, &upper, sizeof bits);
        const int32_t exponent = (int32_t)(bits >> 23) - 127;
        const float zeros = exponent < 0 ? 32.0f : (float)(23 - exponent);
        const float bound = (scores[i] - highest) * inverse + (zeros + 1.0f) * (float)LN2;
        is_possible[i] = bound >= least - FP32_SLACK;
        any |= is_possible[i];
    }
    uint64_t found = 0;
    if (any)
        for (int i = 0; i < 4 * LANES; i++) found |= (uint64_t)is_possible[i] << i;
    return found;
}
#endif

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
        const philox_words words = philox_blocks((uint64_t)first / 4, seed, position);
        /* A last part that is not whole has all looked at. */
        uint64_t possible = ~(uint64_t)0;
        if (is_whole)
            possible = gumbel_possible(scores + first, &words, (float)highest, (float)inverse,
                                       (float)floor);
        if (!possible) continue;
        for (int64_t id = first; id < stop; id++) {
            if (!(possible >> (id - first) & 1)) continue;
            uint32_t word = philox_word(&words, id - first), rest = ~word;
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
