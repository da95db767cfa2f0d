/* Guards of process-private handles: one thread at a time, never across a fork. */

#include "inner.h"

#include <pthread.h>

half fork_count;

static void count_fork(void) { atomic_fetch_add(&fork_count, 1); }

static void watch_forks(void) { pthread_atfork(NULL, NULL, count_fork); }

void guard_init(guard *g) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, watch_forks);
    atomic_init(&g->busy, 0);
    atomic_init(&g->closed, 0);
    g->forks = atomic_load(&fork_count);
}
