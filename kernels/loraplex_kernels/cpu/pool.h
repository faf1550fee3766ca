/* The threads that the kernels share: see pool.c. */
#ifndef LORAPLEX_POOL_H
#define LORAPLEX_POOL_H

#include <stdint.h>

/* A thread's way through a job. */
typedef struct {
    int64_t item;
    int64_t end;
    uint32_t generation;
    int32_t is_alone;
} pool_share;

/* Does `item` and then, one after the other, each that pool_next gives, until that is below zero; `thread`
 * is 0 for the caller of pool_run. After the last, `context` may be gone. */
typedef void pool_body(void *context, pool_share *share, int64_t item, int32_t thread);

/* The next item of the job, the one before it being done; below zero: none is left. */
int64_t pool_next(pool_share *share);

/* Has items 0 .. num_items - 1 done by the caller and up to num_threads - 1 others, and returns when all are. */
void pool_run(pool_body *body, void *context, int64_t num_items, int32_t num_threads);

/* Where every row costs the same: rows of an item, a few items a thread, so that who comes late takes less. */
static inline int64_t pool_item_rows(int64_t num_rows, int32_t num_threads) {
    const int64_t most = num_threads > 1 ? 4 * (int64_t)num_threads : 1;
    return num_rows > most ? (num_rows + most - 1) / most : 1;
}

static inline int64_t pool_num_items(int64_t num_rows, int64_t item_rows) {
    return (num_rows + item_rows - 1) / item_rows;
}

/* Past the last row of an item. */
static inline int64_t pool_item_end(int64_t item, int64_t item_rows, int64_t num_rows) {
    return (item + 1) * item_rows < num_rows ? (item + 1) * item_rows : num_rows;
}

#endif
