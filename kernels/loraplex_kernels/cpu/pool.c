/* A few threads that share out items of work, for kernels that call for them hundreds of times a step.
 *
 * A job is done when its items are, not when every thread has come: whoever is free takes the next item, and a
 * thread that the machine keeps busy with something else takes none. OpenMP's teams wait for each of their threads at
 * the end of every region, which on cores that a gateway and a database share means waiting for the scheduler.
 *
 * There is one job at a time. Who finds another's running does his alone. A forked child begins without threads.
 *
 * An item's bits do not depend on who does it: each thread rounds, and treats subnormal numbers, as its caller does.
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
static uint64_t pool_rounding;
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

/* How this thread rounds, and whether subnormal numbers are zero to it: fegetenv takes 20 times as long, for the
 * sake of x87. */
static uint64_t pool_get_rounding(void) {
#if defined(__SSE__)
    return __builtin_ia32_stmxcsr();
#elif defined(__aarch64__)
    uint64_t fpcr;
    __asm__ volatile("mrs %0, fpcr" : "=r"(fpcr));
    return fpcr;
#else
    return 0;
#endif
}

static void pool_set_rounding(uint64_t rounding) {
#if defined(__SSE__)
    __builtin_ia32_ldmxcsr((uint32_t)rounding);
#elif defined(__aarch64__)
    __asm__ volatile("msr fpcr, %0" ::"r"(rounding));
#else
    (void)rounding;
#endif
}

/* Whom a wake is for: a thread's bit in the mask; the last is that of every thread from there on. */
static uint32_t pool_bit(int32_t thread) { return 1u << (thread < 31 ? thread : 31); }
static uint32_t pool_bits_below(int32_t threads) { return threads < 32 ? (1u << threads) - 1 : UINT32_MAX; }

#ifdef __linux__
static void pool_sleep(_Atomic uint32_t *word, uint32_t value, uint32_t bit) {
    syscall(SYS_futex, word, FUTEX_WAIT_BITSET_PRIVATE, value, NULL, NULL, bit);
}

/* At most so many of those that sleep with a bit of the mask. */
static void pool_wake(_Atomic uint32_t *word, int32_t most, uint32_t mask) {
    syscall(SYS_futex, word, FUTEX_WAKE_BITSET_PRIVATE, most, NULL, NULL, mask);
}
#else
/* One condition for both words: whoever wakes looks whether it was his. */
static pthread_mutex_t pool_mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t pool_condition = PTHREAD_COND_INITIALIZER;

static void pool_sleep(_Atomic uint32_t *word, uint32_t value, uint32_t bit) {
    (void)bit;
    pthread_mutex_lock(&pool_mutex);
    if (atomic_load(word) == value) pthread_cond_wait(&pool_condition, &pool_mutex);
    pthread_mutex_unlock(&pool_mutex);
}

static void pool_wake(_Atomic uint32_t *word, int32_t most, uint32_t mask) {
    (void)word, (void)most, (void)mask;
    pthread_mutex_lock(&pool_mutex);
    pthread_cond_broadcast(&pool_condition);
    pthread_mutex_unlock(&pool_mutex);
}
#endif

static void pool_finish_one(void) {
    if (atomic_fetch_sub(&pool_pending, 1) == 1 && atomic_load(&pool_is_waiting))
        pool_wake(&pool_pending, INT_MAX, pool_bit(0));
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
            pool_sleep(&pool_epoch, epoch, pool_bit(thread));
            atomic_fetch_sub(&pool_sleepers, 1);
            continue;
        }
        if (!atomic_compare_exchange_strong(&pool_ticket, &ticket, ticket - 1)) continue;
        spins = 0;
        /* An item of the job is ours: until it is done the job stays as it is. */
        const int64_t end = pool_items_in_all;
        pool_set_rounding(pool_rounding);
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
#ifndef __linux__
    pthread_mutex_init(&pool_mutex, NULL);
    pthread_cond_init(&pool_condition, NULL);
#endif
}

__attribute__((constructor)) static void pool_begin(void) { pthread_atfork(NULL, NULL, pool_after_fork); }

/* As many as can be had; those that are refused are asked for again by the next job, which costs some microseconds.
 * Signals are for the threads of others, but for those that a thread raises by its own fault: blocked, they would
 * end the process without a word from whoever handles them, such as Python's faulthandler. */
static void pool_start(int32_t num_workers) {
    sigset_t all, before;
    static const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP};
    sigfillset(&all);
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) sigdelset(&all, faults[i]);
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
    for (uint32_t left; (left = atomic_load(&pool_pending)) != 0;) pool_sleep(&pool_pending, left, pool_bit(0));
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
    pool_rounding = pool_get_rounding();
    pool_generation = (pool_generation + 1) & 0xffffff;
    atomic_store(&pool_pending, (uint32_t)num_items);
    atomic_store(&pool_ticket, (uint64_t)pool_generation << 40 | (uint64_t)threads << 32 | (uint64_t)num_items);
    atomic_fetch_add(&pool_epoch, 1);
    if (atomic_load(&pool_sleepers) > 0) {
        /* No more than there is work for, and none that may not take part: they would come for nothing. */
        const int32_t others = (int32_t)(num_items < threads ? num_items : threads) - 1;
        pool_wake(&pool_epoch, others, pool_bits_below(threads));
    }
    pool_share share = {0, num_items, pool_generation, 0};
    const int64_t item = pool_claim(share.generation, num_items);
    if (item >= 0) body(context, &share, item, 0);
    pool_wait();
    atomic_flag_clear(&pool_is_taken);
}
