/* Eight floats with a true fused multiply-add, and bf16 conversion: what the kernels here build on.
 *
 * Every operation has one fixed order of additions; nothing is left for the compiler to reassociate
 * or to fuse (build with -ffp-contract=off and without -ffast-math).
 */
#ifndef LORAPLEX_SIMD_H
#define LORAPLEX_SIMD_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
/* An inner loop that needs all vector registers gets them to itself. */
#define APART static __attribute__((noinline))

INLINE float widen_bf16(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

/* Round to nearest, ties to even, as torch does; NaN stays NaN. */
INLINE uint16_t narrow_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint16_t rounded = (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
    return value != value ? (uint16_t)0x7fc0 : rounded;
}

#if defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>

typedef __m256 v8;
INLINE v8 v8_zero(void) { return _mm256_setzero_ps(); }
INLINE v8 v8_all(float value) { return _mm256_set1_ps(value); }
INLINE v8 v8_load(const float *from) { return _mm256_loadu_ps(from); }
INLINE void v8_store(float *to, v8 value) { _mm256_storeu_ps(to, value); }
INLINE v8 v8_add(v8 a, v8 b) { return _mm256_add_ps(a, b); }
INLINE v8 v8_sub(v8 a, v8 b) { return _mm256_sub_ps(a, b); }
INLINE v8 v8_mul(v8 a, v8 b) { return _mm256_mul_ps(a, b); }
INLINE v8 v8_max(v8 a, v8 b) { return _mm256_max_ps(a, b); }
INLINE v8 v8_fma(v8 a, v8 b, v8 sum) { return _mm256_fmadd_ps(a, b, sum); }
INLINE v8 v8_load_bf16(const uint16_t *from) {
    __m128i bits = _mm_loadu_si128((const __m128i *)from);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
/* The first `count` lanes of a, the others of b. */
INLINE v8 v8_first(v8 a, v8 b, int count) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    __m256 mask = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(count), lane));
    return _mm256_blendv_ps(b, a, mask);
}
/* Lane j of the result is the sum of the lanes of part[j]. */
INLINE v8 v8_sum_each(const v8 *part) {
    __m256 ab = _mm256_hadd_ps(part[0], part[1]), cd = _mm256_hadd_ps(part[2], part[3]);
    __m256 ef = _mm256_hadd_ps(part[4], part[5]), gh = _mm256_hadd_ps(part[6], part[7]);
    __m256 abcd = _mm256_hadd_ps(ab, cd), efgh = _mm256_hadd_ps(ef, gh);
    __m256 low = _mm256_permute2f128_ps(abcd, efgh, 0x20);
    __m256 high = _mm256_permute2f128_ps(abcd, efgh, 0x31);
    return _mm256_add_ps(low, high);
}
/* The sums of the lanes of a, b, c and d, each in two halves, four lanes apart. */
INLINE v8 v8_sum_four(v8 a, v8 b, v8 c, v8 d) {
    return _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
}
/* Lanes j and j + 4 added. */
INLINE void v8_store_four(float *to, v8 halves) {
    _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1)));
}
INLINE float v8_largest(v8 a) {
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
/* 2^n for integral n in [-126, 127]. */
INLINE v8 v8_power_of_two(v8 n) {
    __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
}
INLINE v8 v8_round(v8 a) {
    return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
INLINE v8 v8_div(v8 a, v8 b) { return _mm256_div_ps(a, b); }
/* The same value, in a register: it is not loaded again at each of its uses, which compilers think is cheaper. */
INLINE v8 v8_hold(v8 a) { __asm__("" : "+x"(a)); return a; }
/* -|a|; NaN stays NaN. */
INLINE v8 v8_below(v8 a) { return _mm256_or_ps(a, _mm256_set1_ps(-0.0f)); }
/* then where a < b, else otherwise; otherwise where either is NaN. */
INLINE v8 v8_where_less(v8 a, v8 b, v8 then, v8 otherwise) {
    return _mm256_blendv_ps(otherwise, then, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
}
/* As narrow_bf16, lane by lane. */
INLINE void v8_store_bf16(uint16_t *to, v8 value) {
    const __m256i bits = _mm256_castps_si256(value);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i narrow = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    narrow = _mm256_srli_epi32(narrow, 16);
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    narrow = _mm256_blendv_epi8(narrow, _mm256_set1_epi32(0x7fc0), is_nan);
    const __m256i packed = _mm256_packus_epi32(narrow, narrow);
    _mm_storeu_si128((__m128i *)to,
                     _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08)));
}
#elif defined(FP_FAST_FMAF)
typedef struct { float lane[8]; } v8;
#define EACH_LANE for (int i = 0; i < 8; i++)
INLINE v8 v8_all(float value) { v8 r; EACH_LANE r.lane[i] = value; return r; }
INLINE v8 v8_zero(void) { return v8_all(0.0f); }
INLINE v8 v8_load(const float *from) { v8 r; memcpy(r.lane, from, sizeof r); return r; }
INLINE void v8_store(float *to, v8 value) { memcpy(to, value.lane, sizeof value); }
INLINE v8 v8_add(v8 a, v8 b) { EACH_LANE a.lane[i] += b.lane[i]; return a; }
INLINE v8 v8_sub(v8 a, v8 b) { EACH_LANE a.lane[i] -= b.lane[i]; return a; }
INLINE v8 v8_mul(v8 a, v8 b) { EACH_LANE a.lane[i] *= b.lane[i]; return a; }
/* As the x86 instruction: b where either is NaN. */
INLINE v8 v8_max(v8 a, v8 b) {
    EACH_LANE a.lane[i] = a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i];
    return a;
}
INLINE v8 v8_fma(v8 a, v8 b, v8 sum) {
    EACH_LANE sum.lane[i] = fmaf(a.lane[i], b.lane[i], sum.lane[i]);
    return sum;
}
INLINE v8 v8_load_bf16(const uint16_t *from) {
    v8 r; EACH_LANE r.lane[i] = widen_bf16(from[i]); return r;
}
INLINE v8 v8_first(v8 a, v8 b, int count) {
    EACH_LANE a.lane[i] = i < count ? a.lane[i] : b.lane[i];
    return a;
}
INLINE v8 v8_sum_each(const v8 *part) {
    v8 r;
    for (int j = 0; j < 8; j++) {
        const float *t = part[j].lane;
        r.lane[j] = ((t[0] + t[1]) + (t[2] + t[3])) + ((t[4] + t[5]) + (t[6] + t[7]));
    }
    return r;
}
INLINE v8 v8_sum_four(v8 a, v8 b, v8 c, v8 d) {
    const v8 part[4] = {a, b, c, d};
    v8 r;
    for (int j = 0; j < 4; j++) {
        const float *t = part[j].lane;
        r.lane[j] = (t[0] + t[1]) + (t[2] + t[3]);
        r.lane[j + 4] = (t[4] + t[5]) + (t[6] + t[7]);
    }
    return r;
}
INLINE void v8_store_four(float *to, v8 halves) {
    for (int j = 0; j < 4; j++) to[j] = halves.lane[j] + halves.lane[j + 4];
}
INLINE float v8_largest(v8 a) {
    float top = a.lane[0];
    for (int i = 1; i < 8; i++) top = top > a.lane[i] ? top : a.lane[i];
    return top;
}
INLINE v8 v8_power_of_two(v8 n) { EACH_LANE n.lane[i] = ldexpf(1.0f, (int)n.lane[i]); return n; }
INLINE v8 v8_round(v8 a) { EACH_LANE a.lane[i] = nearbyintf(a.lane[i]); return a; }
INLINE v8 v8_div(v8 a, v8 b) { EACH_LANE a.lane[i] /= b.lane[i]; return a; }
INLINE v8 v8_hold(v8 a) { return a; }
/* -|a|; NaN stays NaN. */
INLINE v8 v8_below(v8 a) { EACH_LANE a.lane[i] = -fabsf(a.lane[i]); return a; }
/* then where a < b, else otherwise; otherwise where either is NaN. */
INLINE v8 v8_where_less(v8 a, v8 b, v8 then, v8 otherwise) {
    EACH_LANE then.lane[i] = a.lane[i] < b.lane[i] ? then.lane[i] : otherwise.lane[i];
    return then;
}
/* As narrow_bf16, lane by lane. */
INLINE void v8_store_bf16(uint16_t *to, v8 value) { EACH_LANE to[i] = narrow_bf16(value.lane[i]); }
#else
#error "these kernels need a CPU with fused multiply-add"
#endif

/* The sum of all lanes, in one tree. */
INLINE float v8_total(v8 a) {
    float t[8];
    v8_store(t, a);
    return ((t[0] + t[4]) + (t[2] + t[6])) + ((t[1] + t[5]) + (t[3] + t[7]));
}

INLINE float v8_top(v8 a) {
    float t[8];
    v8_store(t, a);
    float top = t[0];
    for (int i = 1; i < 8; i++)
        if (t[i] > top || t[i] != t[i]) top = t[i];
    return top;
}

/* e^a for a <= 0 (softmax never needs more), within 2 ulp; e^-87 below -87; NaN stays NaN.
 * e^a = 2^n e^r with |r| <= ln(2)/2; e^r by a polynomial of degree 6 (Taylor, error < 2e-8). */
INLINE v8 v8_exp(v8 a) {
    const v8 clipped = v8_max(v8_all(-87.0f), a);
    const v8 n = v8_round(v8_mul(clipped, v8_all(1.44269504088896341f)));
    v8 r = v8_fma(n, v8_all(-0.693359375f), clipped);
    r = v8_fma(n, v8_all(2.12194440e-4f), r);
    v8 p = v8_all(1.0f / 5040.0f);
    p = v8_fma(p, r, v8_all(1.0f / 720.0f));
    p = v8_fma(p, r, v8_all(1.0f / 120.0f));
    p = v8_fma(p, r, v8_all(1.0f / 24.0f));
    p = v8_fma(p, r, v8_all(1.0f / 6.0f));
    p = v8_fma(p, r, v8_all(0.5f));
    p = v8_fma(p, r, v8_all(1.0f));
    p = v8_fma(p, r, v8_all(1.0f));
    return v8_mul(p, v8_power_of_two(n));
}

/* 1 / (1 + e^-a) for all a, within 4 ulp, but 0 below -87 (where it is less than 2e-38); NaN stays NaN.
 * It is made of e^-|a|, which cannot overflow. */
INLINE v8 v8_sigmoid(v8 a) {
    const v8 one = v8_all(1.0f), below = v8_below(a);
    const v8 small = v8_where_less(below, v8_all(-87.0f), v8_zero(), v8_exp(below));
    const v8 top = v8_where_less(a, v8_zero(), small, one);
    return v8_div(top, v8_add(one, small));
}

/* 2^a for a <= 0, within 2 ulp; 2^-126 below -126; NaN stays NaN; 2^0 is 1.
 * The fraction's polynomial is of degree 6 (equal ripple, error < 2e-9). */
INLINE v8 v8_exp2(v8 a) {
    const v8 clipped = v8_max(v8_all(-126.0f), a);
    const v8 n = v8_round(clipped);
    const v8 r = v8_sub(clipped, n);
    v8 p = v8_all(1.535336191e-4f);
    p = v8_fma(p, r, v8_all(1.339887441e-3f));
    p = v8_fma(p, r, v8_all(9.618437358e-3f));
    p = v8_fma(p, r, v8_all(5.550332471e-2f));
    p = v8_fma(p, r, v8_all(2.402264791e-1f));
    p = v8_fma(p, r, v8_all(6.931472029e-1f));
    p = v8_fma(p, r, v8_all(1.0f));
    return v8_mul(p, v8_power_of_two(n));
}

/* tanh(a), within 1e-7 of it and, near zero, within 4 ulp; NaN stays NaN. Far from zero it is made of
 * e^-2|a|, which cannot overflow; near zero that would cancel: an odd polynomial there (Cephes). */
INLINE v8 v8_tanh(v8 a) {
    const v8 one = v8_all(1.0f), below = v8_below(a);
    const v8 small = v8_exp(v8_add(below, below));
    v8 far = v8_div(v8_sub(one, small), v8_add(one, small));
    far = v8_where_less(a, v8_zero(), v8_sub(v8_zero(), far), far);
    const v8 square = v8_mul(a, a);
    v8 p = v8_all(-5.70498872745e-3f);
    p = v8_fma(p, square, v8_all(2.06390887954e-2f));
    p = v8_fma(p, square, v8_all(-5.37397155531e-2f));
    p = v8_fma(p, square, v8_all(1.33314422036e-1f));
    p = v8_fma(p, square, v8_all(-3.33332819422e-1f));
    const v8 near = v8_fma(v8_mul(p, square), a, a);
    return v8_where_less(v8_all(-0.625f), below, near, far);
}

INLINE float v8_exp_one(float a) {
    float t[8];
    v8_store(t, v8_exp(v8_all(a)));
    return t[0];
}

#endif
