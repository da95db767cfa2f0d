/* What the C files share and Python never sees: typed access into a checked segment, handle guards, time. */

#ifndef OUTFEED_RING_INNER_H
#define OUTFEED_RING_INNER_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* syscall; this header comes first in every file */
#endif

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

#include "api.h"
#include "clock.h"
#include "fences.h"
#include "layout.h"

#define LONGEST_SLEEP_NS NS_PER_S /* no sleep is longer: a lost wake-up may cost a moment, never a hang */

#define LAST_POSITION (UINT64_C(1) << 62)

static_assert(RING_RECORD_HEADER == sizeof(record), "layout");

static inline lane_block *lane_at(const ring *r, uint32_t lane) {
    return (lane_block *)(r->base + PAGE + (uint64_t)lane * sizeof(lane_block));
}

static inline consumer_block *consumer_at(const ring *r, uint32_t index) {
    return (consumer_block *)(r->base + PAGE + (uint64_t)r->lanes * sizeof(lane_block) +
                              (uint64_t)index * sizeof(consumer_block));
}

static inline head_line *head_at(const ring *r, uint32_t index, uint32_t lane) {
    return (head_line *)(r->base + r->heads + ((uint64_t)index * r->lanes + lane) * sizeof(head_line));
}

/* Offset in the segment of a lane's position. */
static inline uint64_t place(const ring *r, uint32_t lane, uint64_t position) {
    return r->data + (uint64_t)lane * r->capacity + (position & (r->capacity - 1));
}

static inline uint64_t largest_body(const ring *r) { return r->capacity / 4; }

static inline uint64_t record_bytes(uint64_t body) {
    return (RING_RECORD_HEADER + body + RING_RECORD_ALIGN - 1) & ~(uint64_t)(RING_RECORD_ALIGN - 1);
}

/* A head and a tail make sense together: aligned, in order, at most a lane apart, far from wrapping. */
static inline int sane_span(const ring *r, uint64_t head, uint64_t tail) {
    return ((head | tail) & (RING_RECORD_ALIGN - 1)) == 0 && head <= tail && tail - head <= r->capacity &&
           tail < LAST_POSITION;
}

/* Close a lane to everyone; the first position found stays. */
void quarantine(const ring *r, uint32_t lane, uint64_t position);

static inline void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Counts forks of this process; a handle from before the last one is refused (guard.c). */
extern half fork_count;

typedef struct guard {
    half busy;
    half closed;
    uint32_t forks;
} guard;

void guard_init(guard *g);

/* RING_OK and the handle is ours until guard_leave, or why not. A child that was forked while a thread of its parent
 * was inside has a handle that stays busy: to the child it is closed all the same. */
static inline int guard_enter(guard *g) {
    if (g->forks != peek_half(&fork_count)) return RING_CLOSED;
    if (!take_guard(&g->busy)) return RING_BUSY;
    if (peek_half(&g->closed)) {
        leave_guard(&g->busy);
        return RING_CLOSED;
    }
    return RING_OK;
}

static inline void guard_leave(guard *g) { leave_guard(&g->busy); }

/* Sleep on a word while it is `expected`, or wake one that does. RING_INTERRUPTED when a signal came. */
int futex_sleep(half *flag, uint32_t expected, int64_t timeout_ns);
void futex_wake(half *flag);

/* Wake the lane's writer if it sleeps. The wake does not hang on the flag: who took it may have died since. */
static inline void wake_writer(lane_block *l) {
    take_flag(&l->room_parked);
    futex_wake(&l->room_parked);
}

/* A doorbell's name, NUL-padded: in the segment as words. */
typedef union bell_name {
    uint64_t words[RING_NAME_BYTES / 8];
    char text[RING_NAME_BYTES];
} bell_name;

/* Another process's doorbell, opened when first needed and again when the cursor changes hands. */
typedef struct caller {
    bell_block *bell;
    uint32_t turn;
} caller;

/* Ring the doorbell of a consumer whose parked flag the caller of this has just taken. */
void call_consumer(consumer_block *c, caller *cached);
void caller_close(caller *cached);
/* Until `deadline` on the monotonic clock: RING_OK when rung (or there is reason to look again), RING_FULL when
 * time is up, RING_INTERRUPTED when a signal came, rung or not. */
int bell_sleep(bell *b, int64_t deadline);
int bell_begin(bell *b);
void bell_end(bell *b);
int bell_was_rung(bell *b);
/* How long its owner spins before it parks: it adapts, within a limit (wait.c). */
typedef struct spinning {
    int64_t next_ns, longest_ns;
} spinning;
spinning *bell_spin(bell *b);

int bell_name_ok(const char *name, size_t bytes);

#endif
