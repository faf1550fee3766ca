/* A few threads that share out items of work, for kernels that call for them hundreds of times a step.
 *
 * A job is done when its items are, not when every thread has come: whoever is free takes the next item, and a
 * thread that the machine keeps busy with something else takes none. OpenMP's teams wait for each of their threads at
 * the end of every region, which on cores that a gateway and a database share means waiting for the scheduler.
 *
 * There is one job at a time. Who finds another's running does his alone. A forked child begins without threads.
 */
#define _GNU_SOURCE
#include "pool.h"

#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sched.h>
#endif

#define POOL_MOST_THREADS 255
#define POOL_MOST_ITEMS INT32_MAX
/* Looks for work, or for the end of it, before a thread sleeps: 50 to 120 us, more than lies between two
 * calls for threads within a step. */
#define POOL_SPINS 2000

/* What is left of a job, in one word so that it is taken from the job that was looked at: generation (24 bits),
 * threads that may take part (8), items left (32). */
static _Atomic uint64_t pool_ticket;
static _Atomic uint32_t pool_epoch;   /* changes with every job: idle threads sleep on it */
static _Atomic uint32_t pool_pending; /* items that are not done: the caller sleeps on it */
static _Atomic int32_t pool_sleepers, pool_is_waiting;
static atomic_flag pool_is_taken = ATOMIC_FLAG_INIT;
/* The job; written only while no item of it can be taken. */
static pool_body *pool_the_body;
static void *pool_the_context;
static int64_t pool_items_in_all;
/* Of whoever has the pool. */
static int32_t pool_num_workers;
static uint32_t pool_generation;

static uint32_t pool_ticket_generation(uint64_t ticket) { return (uint32_t)(ticket >> 40); }
static int32_t pool_ticket_threads(uint64_t ticket) { return (int32_t)(ticket >> 32 & 0xff); }
static uint32_t pool_ticket_left(uint64_t ticket) { return (uint32_t)ticket; }

static void pool_pause(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb");
#endif
}

static void pool_sleep(_Atomic uint32_t *word, uint32_t value) {
#ifdef __linux__
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
#else
    if (atomic_load(word) == value) sched_yield();
#endif
}

static void pool_wake(_Atomic uint32_t *word) {
#ifdef __linux__
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
#else
    (void)word;
#endif
}

static void pool_finish_one(void) {
    if (atomic_fetch_sub(&pool_pending, 1) == 1 && atomic_load(&pool_is_waiting)) pool_wake(&pool_pending);
}

/* The next item of that generation; below zero: there is none. */
static int64_t pool_claim(uint32_t generation, int64_t end) {
    uint64_t ticket = atomic_load(&pool_ticket);
    do {
        if (pool_ticket_generation(ticket) != generation || pool_ticket_left(ticket) == 0) return -1;
    } while (!atomic_compare_exchange_weak(&pool_ticket, &ticket, ticket - 1));
    return end - (int64_t)pool_ticket_left(ticket);
}

int64_t pool_next(pool_share *share) {
    if (share->is_alone) return ++share->item < share->end ? share->item : -1;
    const int64_t item = pool_claim(share->generation, share->end);
    pool_finish_one();
    return item;
}

static void *pool_work(void *argument) {
    const int32_t thread = (int32_t)(intptr_t)argument;
    int spins = 0;
    for (;;) {
        const uint32_t epoch = atomic_load(&pool_epoch);
        uint64_t ticket = atomic_load(&pool_ticket);
        if (pool_ticket_left(ticket) == 0 || thread >= pool_ticket_threads(ticket)) {
            if (++spins < POOL_SPINS) {
                pool_pause();
                continue;
            }
            spins = 0;
            atomic_fetch_add(&pool_sleepers, 1);
            pool_sleep(&pool_epoch, epoch);
            atomic_fetch_sub(&pool_sleepers, 1);
            continue;
        }
        if (!atomic_compare_exchange_strong(&pool_ticket, &ticket, ticket - 1)) continue;
        spins = 0;
        /* An item of the job is ours: until it is done the job stays as it is. */
        const int64_t end = pool_items_in_all;
        pool_share share = {0, end, pool_ticket_generation(ticket), 0};
        pool_the_body(pool_the_context, &share, end - (int64_t)pool_ticket_left(ticket), thread);
    }
    return NULL;
}

static void pool_after_fork(void) {
    pool_num_workers = 0;
    atomic_store(&pool_ticket, 0);
    atomic_store(&pool_sleepers, 0);
    atomic_store(&pool_is_waiting, 0);
    atomic_flag_clear(&pool_is_taken);
}

__attribute__((constructor)) static void pool_begin(void) { pthread_atfork(NULL, NULL, pool_after_fork); }

/* As many as can be had; signals are for the threads of others. */
static void pool_start(int32_t num_workers) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (pool_num_workers < num_workers) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, pool_work, (void *)(intptr_t)(pool_num_workers + 1)) != 0) break;
        pthread_detach(thread);
        pool_num_workers++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static void pool_wait(void) {
    for (int spins = 0; spins < POOL_SPINS; spins++) {
        if (atomic_load(&pool_pending) == 0) return;
        pool_pause();
    }
    atomic_store(&pool_is_waiting, 1);
    for (uint32_t left; (left = atomic_load(&pool_pending)) != 0;) pool_sleep(&pool_pending, left);
    atomic_store(&pool_is_waiting, 0);
}

void pool_run(pool_body *body, void *context, int64_t num_items, int32_t num_threads) {
    if (num_items <= 0) return;
    const int is_shared = num_threads > 1 && num_items > 1 && num_items <= POOL_MOST_ITEMS;
    if (!is_shared || atomic_flag_test_and_set(&pool_is_taken)) {
        pool_share share = {0, num_items, 0, 1};
        body(context, &share, 0, 0);
        return;
    }
    const int32_t threads = num_threads < POOL_MOST_THREADS ? num_threads : POOL_MOST_THREADS;
    if (pool_num_workers < threads - 1) pool_start(threads - 1);
    pool_the_body = body;
    pool_the_context = context;
    pool_items_in_all = num_items;
    pool_generation = (pool_generation + 1) & 0xffffff;
    atomic_store(&pool_pending, (uint32_t)num_items);
    atomic_store(&pool_ticket, (uint64_t)pool_generation << 40 | (uint64_t)threads << 32 | (uint64_t)num_items);
    atomic_fetch_add(&pool_epoch, 1);
    if (atomic_load(&pool_sleepers) > 0) pool_wake(&pool_epoch);
    pool_share share = {0, num_items, pool_generation, 0};
    const int64_t item = pool_claim(share.generation, num_items);
    if (item >= 0) body(context, &share, item, 0);
    pool_wait();
    atomic_flag_clear(&pool_is_taken);
}
