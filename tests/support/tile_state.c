/* Whether the running thread has matrix tiles in use (AMX), and how it comes to. */
#include <stdint.h>

/* Bits 17 and 18 of the state in use: the tiles' configuration and their data. Source: Intel SDM, XGETBV. */
int tiles_in_use(void) {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(1));
    return low >> 17 & 3;
}

/* One tile, of one row of 64 bytes, which is zeroed. */
void tiles_take(void) {
    static const uint8_t config[64] = {[0] = 1, [16] = 64, [48] = 1};
    __asm__ volatile("ldtilecfg %0\n\ttilezero %%tmm0" ::"m"(config));
}

void tiles_release(void) { __asm__ volatile("tilerelease"); }
