/* How linear.c stores weights that meet rows of bf16 where the CPU multiplies bf16: blocks of BLOCK_K inputs of
 * BLOCK_OUTPUTS outputs, all blocks of the same outputs in a row, so that a product reads them from front to back.
 *
 *   bf16  two tiles (amx.h's B), a tile the weights of 16 outputs: row r holds, for each output, the weights of
 *         k = 2 r and 2 r + 1 of the block side by side
 *   int8  before the first block a fp32 scale for each output; then for each tile's row 16 bytes of k = 2 r, 16 of
 *         k = 2 r + 1
 *   int4  for each tile a line of 16 bf16 scales and 16 bf16 offsets, then four lines of 16 words: nibble j of word i
 *         of line l is output 8 (j % 2) + i / 2 and k = 2 (4 l + j / 2) + i % 2
 *
 * The bits of an output beyond the last and of a k beyond the last are zeros; the latter meet zeros.
 * A weight's value: int8 q, whose sum is multiplied by the scale; int4 q * scale + offset, rounded to fp32 and then to
 * bf16. So all of them are tiles of bf16 in the end.
 */
#ifndef LORAPLEX_BLOCKS_H
#define LORAPLEX_BLOCKS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "simd.h"

#define BLOCK_K 32
#define BLOCK_OUTPUTS 32
#define BLOCK_TILE_OUTPUTS 16
#define BLOCK_TILE_BYTES 1024
/* A block as bf16. */
#define BLOCK_BYTES (2 * BLOCK_TILE_BYTES)

enum { BLOCK_BF16 = 8, BLOCK_INT8, BLOCK_INT4 };

INLINE size_t block_bytes(int format) {
    return format == BLOCK_BF16 ? BLOCK_BYTES : format == BLOCK_INT8 ? 1024 : 640;
}

/* Bytes before the first block. */
INLINE size_t block_header(int format) { return format == BLOCK_INT8 ? BLOCK_OUTPUTS * 4 : 0; }

INLINE int64_t block_count(int64_t num_inputs) { return (num_inputs + BLOCK_K - 1) / BLOCK_K; }

/* Bytes of all blocks of the same outputs. */
INLINE size_t block_panel_bytes(int format, int64_t num_inputs) {
    return block_header(format) + (size_t)block_count(num_inputs) * block_bytes(format);
}

/* Puts the weight of an output and a k, both within the block, to its place; what was there is zero. */
INLINE void block_put(int format, char *block, int output, int k, const void *weights, size_t from) {
    const int tile = output / BLOCK_TILE_OUTPUTS, n = output % BLOCK_TILE_OUTPUTS;
    const int row = k / 2, odd = k % 2;
    if (format == BLOCK_BF16) {
        uint16_t *to = (uint16_t *)(block + tile * BLOCK_TILE_BYTES);
        to[row * 32 + n * 2 + odd] = ((const uint16_t *)weights)[from];
    } else if (format == BLOCK_INT8) {
        block[tile * 512 + row * 32 + odd * 16 + n] = ((const char *)weights)[from];
    } else {
        uint32_t *to = (uint32_t *)(block + tile * 320 + 64) + row / 4 * 16;
        const int nibble = row % 4 * 2 + n / 8;
        to[n % 8 * 2 + odd] |= (uint32_t)((const uint8_t *)weights)[from] << (4 * nibble);
    }
}

/* Scale and offset of an output of an int4 block. */
INLINE void block_put_scale(char *block, int output, float scale, float offset) {
    uint16_t *line = (uint16_t *)(block + output / BLOCK_TILE_OUTPUTS * 320);
    line[output % BLOCK_TILE_OUTPUTS] = narrow_bf16(scale);
    line[output % BLOCK_TILE_OUTPUTS + 16] = narrow_bf16(offset);
}

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#define HAS_BF16 1

/* One tile's bytes as whole numbers in bf16, which holds them all. */
INLINE void block_expand_int8(const char *bits, char *tile) {
    const __m512i high = _mm512_set1_epi32((int)0xffff0000u);
    for (int row = 0; row < 16; row++, bits += 32, tile += 64) {
        const __m512i even = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)bits));
        const __m512i odd = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)bits + 1));
        const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(_mm512_cvtepi32_ps(even)), 16);
        /* low | (odd & high) */
        const __m512i pairs = _mm512_ternarylogic_epi32(
            low, _mm512_castps_si512(_mm512_cvtepi32_ps(odd)), high, 0xf8);
        _mm512_storeu_si512(tile, pairs);
    }
}

/* Number `part` (0, 1: scales, 2, 3: offsets) of the four vectors of a line, each of 8 outputs, twice. */
INLINE __m512 block_scales(__m512i line, int part) {
    const __m512i eight = _mm512_set_epi16(7, 0, 7, 0, 6, 0, 6, 0, 5, 0, 5, 0, 4, 0, 4, 0, 3, 0, 3, 0,
                                           2, 0, 2, 0, 1, 0, 1, 0, 0, 0, 0, 0);
    const __m512i at = _mm512_add_epi16(eight, _mm512_set1_epi16((short)(8 * part)));
    return _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(0xaaaaaaaau, at, line));
}

INLINE void block_expand_int4(const char *bits, char *tile) {
    const __m512 levels = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i line = _mm512_loadu_si512(bits);
    const __m512 scale[2] = {block_scales(line, 0), block_scales(line, 1)};
    const __m512 offset[2] = {block_scales(line, 2), block_scales(line, 3)};
    for (int l = 0; l < 4; l++) {
        const __m512i words = _mm512_loadu_si512(bits + 64 + l * 64);
        for (int j = 0; j < 4; j++) {
            /* The permutation looks at the lowest four bits only. */
            const __m512 low = _mm512_permutexvar_ps(_mm512_srli_epi32(words, 8 * j), levels);
            const __m512 high = _mm512_permutexvar_ps(_mm512_srli_epi32(words, 8 * j + 4), levels);
            const __m512bh pairs =
                _mm512_cvtne2ps_pbh(_mm512_fmadd_ps(high, scale[1], offset[1]),
                                    _mm512_fmadd_ps(low, scale[0], offset[0]));
            memcpy(tile + (4 * l + j) * 64, &pairs, sizeof pairs);
        }
    }
}

/* A whole block as bf16. */
INLINE void block_expand(int format, const char *bits, char *to) {
    for (int tile = 0; tile < 2; tile++) {
        if (format == BLOCK_INT8)
            block_expand_int8(bits + tile * 512, to + tile * BLOCK_TILE_BYTES);
        else
            block_expand_int4(bits + tile * 320, to + tile * BLOCK_TILE_BYTES);
    }
}
#else
#define HAS_BF16 0
#endif

#endif
