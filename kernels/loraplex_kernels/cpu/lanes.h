/* Vectors as wide as the CPU's: sixteen floats with AVX-512, else eight. One source for both: GCC's vector types,
 * and a true fused multiply-add.
 *
 * What is computed per lane does not depend on the width, so neither do the bits. -DLANES=16 tries the wide
 * layout on a CPU without it, slowly.
 */
#ifndef LORAPLEX_LANES_H
#define LORAPLEX_LANES_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "simd.h"

#ifndef LANES
#ifdef __AVX512F__
#define LANES 16
#else
#define LANES 8
#endif
#endif

typedef float lanes_f __attribute__((vector_size(LANES * 4)));
typedef uint32_t lanes_u __attribute__((vector_size(LANES * 4)));
typedef int32_t lanes_i __attribute__((vector_size(LANES * 4)));

INLINE lanes_f lanes_load(const float *from) {
    lanes_f value;
    memcpy(&value, from, sizeof value);
    return value;
}
INLINE lanes_u lanes_load_bits(const void *from) {
    lanes_u value;
    memcpy(&value, from, sizeof value);
    return value;
}
INLINE void lanes_store(float *to, lanes_f value) { memcpy(to, &value, sizeof value); }
INLINE lanes_f lanes_all(float value) { return value - (lanes_f){0}; }
INLINE lanes_f lanes_of_bits(lanes_u bits) { return (lanes_f)bits; }

/* LANES bytes. */
INLINE lanes_i lanes_load_int8(const void *from) {
#if LANES == 16 && defined(__AVX512F__)
    return (lanes_i)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from));
#elif LANES == 8 && defined(__AVX2__)
    return (lanes_i)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from));
#else
    lanes_i value;
    for (int i = 0; i < LANES; i++) value[i] = ((const int8_t *)from)[i];
    return value;
#endif
}

INLINE lanes_f lanes_fma(lanes_f a, lanes_f b, lanes_f sum) {
#if LANES == 16 && defined(__AVX512F__)
    return (lanes_f)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif LANES == 8 && defined(__AVX2__) && defined(__FMA__)
    return (lanes_f)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#else
    for (int i = 0; i < LANES; i++) sum[i] = fmaf(a[i], b[i], sum[i]);
    return sum;
#endif
}

#endif
