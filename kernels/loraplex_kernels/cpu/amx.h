/* Matrix tiles in hardware (Intel AMX, bf16): what linear.c, attention.c and lora.c share of them.
 *
 * A tile has up to 16 rows of 64 bytes. tdpbf16ps adds to each number of a tile of fp32 sums 16 pairs of products,
 * of a row of A (32 bf16) and of a column of B (16 rows of pairs: row r holds, for each of 16 columns, the values
 * of k = 2 r and 2 r + 1 side by side). A row of sums depends on that row of A and on B only, whatever the number
 * of rows, so a product in tiles obeys the row rule as long as its k are taken in one order. Its bits are not those
 * of avx512_bf16's vdpbf16ps: who uses tiles uses them for every number of rows.
 * Subnormal inputs and results count as zero. Source: Intel SDM, TDPBF16PS.
 */
#ifndef LORAPLEX_AMX_H
#define LORAPLEX_AMX_H

#include <stdint.h>

#include "simd.h"

#define AMX_ROWS 16
#define AMX_ROW_BYTES 64
#define AMX_K 32 /* bf16 of a row of A */
#define AMX_TILES 8

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__linux__)
#define HAS_AMX 1
#include <sys/syscall.h>
#include <unistd.h>

/* Memory image of ldtilecfg. */
typedef struct {
    uint8_t palette;
    uint8_t start_row;
    uint8_t reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} __attribute__((aligned(64))) amx_config;

/* Asks Linux for the tiles' registers, which a process may not use unasked; whether it may now. Threads
 * begun later may too, and those that run already. */
INLINE int amx_allow(void) {
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

/* All tiles of full size. Change `rows` of those that have fewer. */
INLINE amx_config amx_full(void) {
    amx_config config = {.palette = 1};
    for (int i = 0; i < AMX_TILES; i++) {
        config.row_bytes[i] = AMX_ROW_BYTES;
        config.rows[i] = AMX_ROWS;
    }
    return config;
}

/* GCC's intrinsics that load tiles do not say that they read memory: between what is written and the tile loaded
 * from it stands this, or the stores may come too late or, a local configuration's, never. */
INLINE void amx_written(void) { __asm__ volatile("" ::: "memory"); }

/* A thread configures before its first tile, about 80 ns, and releases after its last: others who run in the
 * same thread, oneDNN among them, configure for themselves. */
INLINE void amx_configure(const amx_config *config) {
    __asm__ volatile("" ::"r"(config) : "memory");
    _tile_loadconfig(config);
}
INLINE void amx_release(void) { _tile_release(); }
#else
#define HAS_AMX 0
INLINE int amx_allow(void) { return 0; }
#endif

#endif
