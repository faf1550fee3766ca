/* Sixteen floats with AVX-512: operations of simd.h twice as wide, each lane with the bits that it has there. */
#ifndef LORAPLEX_V16_H
#define LORAPLEX_V16_H

#include <stdint.h>

#include "simd.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
#define HAS_V16 1

typedef __m512 v16;
INLINE v16 v16_zero(void) { return _mm512_setzero_ps(); }
INLINE v16 v16_all(float value) { return _mm512_set1_ps(value); }
INLINE v16 v16_load(const float *from) { return _mm512_loadu_ps(from); }
INLINE void v16_store(float *to, v16 value) { _mm512_storeu_ps(to, value); }
INLINE v16 v16_add(v16 a, v16 b) { return _mm512_add_ps(a, b); }
INLINE v16 v16_sub(v16 a, v16 b) { return _mm512_sub_ps(a, b); }
INLINE v16 v16_mul(v16 a, v16 b) { return _mm512_mul_ps(a, b); }
INLINE v16 v16_div(v16 a, v16 b) { return _mm512_div_ps(a, b); }
INLINE v16 v16_fma(v16 a, v16 b, v16 sum) { return _mm512_fmadd_ps(a, b, sum); }
INLINE v16 v16_load_bf16(const uint16_t *from) {
    const __m256i bits = _mm256_loadu_si256((const __m256i *)from);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
/* Lanes 0 to 7, and 8 to 15. */
INLINE v8 v16_low(v16 a) { return _mm512_castps512_ps256(a); }
INLINE v8 v16_high(v16 a) { return _mm512_extractf32x8_ps(a, 1); }

/* `low` in lanes 0 to 7, `high` in the others. */
INLINE v16 v16_pair(v8 low, v8 high) {
    return _mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1);
}
INLINE v16 v16_hold(v16 a) { __asm__("" : "+v"(a)); return a; }

/* As narrow_bf16, in the upper half of each lane; what is below means nothing. */
INLINE __m512i v16_narrow(v16 value) {
    const __m512i bits = _mm512_castps_si512(value);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i narrow =
        _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 is_nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    return _mm512_mask_mov_epi32(narrow, is_nan, _mm512_set1_epi32(0x7fc00000));
}
INLINE void v16_store_bf16(uint16_t *to, v16 value) {
    const __m512i narrow = _mm512_srli_epi32(v16_narrow(value), 16);
    _mm256_storeu_si256((__m256i *)to, _mm512_cvtepi32_epi16(narrow));
}
/* As bf16 would hold it. */
INLINE v16 v16_round_bf16(v16 value) {
    const __m512i upper = _mm512_set1_epi32((int)0xffff0000u);
    return _mm512_castsi512_ps(_mm512_and_si512(v16_narrow(value), upper));
}

/* See v8_exp. */
INLINE v16 v16_exp(v16 a) {
    /* b where either is NaN, as in v8_max. */
    const v16 clipped = _mm512_max_ps(v16_all(-87.0f), a);
    const v16 n = _mm512_roundscale_ps(v16_mul(clipped, v16_all(1.44269504088896341f)),
                                       _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    v16 r = v16_fma(n, v16_all(-0.693359375f), clipped);
    r = v16_fma(n, v16_all(2.12194440e-4f), r);
    v16 p = v16_all(1.0f / 5040.0f);
    p = v16_fma(p, r, v16_all(1.0f / 720.0f));
    p = v16_fma(p, r, v16_all(1.0f / 120.0f));
    p = v16_fma(p, r, v16_all(1.0f / 24.0f));
    p = v16_fma(p, r, v16_all(1.0f / 6.0f));
    p = v16_fma(p, r, v16_all(0.5f));
    p = v16_fma(p, r, v16_all(1.0f));
    p = v16_fma(p, r, v16_all(1.0f));
    const __m512i exponent = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
    return v16_mul(p, _mm512_castsi512_ps(_mm512_slli_epi32(exponent, 23)));
}

/* See v8_exp2. */
INLINE v16 v16_exp2(v16 a) {
    const v16 clipped = _mm512_max_ps(v16_all(-126.0f), a);
    const v16 n = _mm512_roundscale_ps(clipped, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const v16 r = v16_sub(clipped, n);
    v16 p = v16_all(1.535336191e-4f);
    p = v16_fma(p, r, v16_all(1.339887441e-3f));
    p = v16_fma(p, r, v16_all(9.618437358e-3f));
    p = v16_fma(p, r, v16_all(5.550332471e-2f));
    p = v16_fma(p, r, v16_all(2.402264791e-1f));
    p = v16_fma(p, r, v16_all(6.931472029e-1f));
    p = v16_fma(p, r, v16_all(1.0f));
    const __m512i exponent = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
    return v16_mul(p, _mm512_castsi512_ps(_mm512_slli_epi32(exponent, 23)));
}

/* See v8_sigmoid. */
INLINE v16 v16_sigmoid(v16 a) {
    const v16 one = v16_all(1.0f), below = _mm512_or_ps(a, v16_all(-0.0f));
    const __mmask16 is_tiny = _mm512_cmp_ps_mask(below, v16_all(-87.0f), _CMP_LT_OQ);
    const v16 small = _mm512_mask_mov_ps(v16_exp(below), is_tiny, v16_zero());
    const __mmask16 is_negative = _mm512_cmp_ps_mask(a, v16_zero(), _CMP_LT_OQ);
    return v16_div(_mm512_mask_mov_ps(one, is_negative, small), v16_add(one, small));
}
#else
#define HAS_V16 0
#endif

#endif
