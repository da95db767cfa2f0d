/* Waiting for frames on any number of cursors: spin a moment, park all, look once more, sleep. */

#include "reader.h"

#include <sched.h>

#define SHORTEST_SPIN_NS 2000
#define WAKE_UP_NS 50000 /* about what a sleep and a wake-up cost on a virtual machine */

static int any_has_more(lane_reader *const *readers, uint32_t count) {
    for (uint32_t i = 0; i < count; i++)
        if (reader_has_more(readers[i])) return 1;
    return 0;
}

/* A spin longer than a wake-up costs, which only a doorbell's owner can ask for, lets others run between its
 * looks: the writer it waits for may itself wait for this core. With nobody else to run, a yield returns at
 * once. Shorter spins do not yield: where every core is busy, who yields comes back later than who is woken. */
static int spin(lane_reader *const *readers, uint32_t count, int64_t start, int64_t spin_ns) {
    for (int64_t spent; (spent = now_ns() - start) < spin_ns;) {
        if (any_has_more(readers, count)) return 1;
        if (spent > WAKE_UP_NS) sched_yield();
        for (int i = 0; i < 8; i++) relax();
    }
    return 0;
}

static void park_all(lane_reader *const *readers, uint32_t count) {
    for (uint32_t i = 0; i < count; i++) {
        reader_tell(readers[i]);
        reader_tell_bell(readers[i]);
        bump(&readers[i]->shared->parks, 1);
        set_flag(&readers[i]->shared->parked);
    }
    fence_parked();
}

static void unpark_all(lane_reader *const *readers, uint32_t count) {
    for (uint32_t i = 0; i < count; i++)
        /* A flag that is gone was taken by a writer, which rings or has rung. */
        if (!take_flag(&readers[i]->shared->parked)) bump(&readers[i]->shared->wakes, 1);
}

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* How long to spin next time: a sleep that was shorter than waking costs, or than what the doorbell's owner is
 * willing to spin, should have been a spin; one that was longer made the spin before it a waste. So an idle or
 * slow ring is hardly spun on, and a stream is not interrupted by a sleep (and its writer by a system call) at
 * every hiccup, nor, when the owner said so, between any two frames. */
static void learn(spinning *s, int64_t slept_ns) {
    int64_t worth = s->longest_ns > WAKE_UP_NS ? s->longest_ns : WAKE_UP_NS;
    int64_t next = slept_ns < worth ? s->next_ns * 2 : s->next_ns / 2;
    s->next_ns = least(next > SHORTEST_SPIN_NS ? next : SHORTEST_SPIN_NS, s->longest_ns);
}

static int wait_on(bell *b, lane_reader *const *readers, uint32_t count, int64_t timeout_ns) {
    if (any_has_more(readers, count)) return 1;
    if (bell_was_rung(b) || timeout_ns <= 0) return 0;
    int64_t start = now_ns(), parked;
    spinning *s = bell_spin(b);
    timeout_ns = least(timeout_ns, LONGEST_SLEEP_NS);
    if (spin(readers, count, start, least(s->next_ns, timeout_ns))) return 1;
    int64_t deadline = start + timeout_ns;
    parked = now_ns();
    int slept = RING_OK, more = 0, rung = 0;
    /* A ring left over from an earlier park ends a sleep early; go round until there is a reason. The
     * bound is for a doorbell that somebody rings without end. */
    for (int round = 0; round < 1024 && !more && !rung && slept == RING_OK; round++) {
        park_all(readers, count);
        more = any_has_more(readers, count);
        if (!more) slept = bell_sleep(b, deadline);
        unpark_all(readers, count);
        more = more || any_has_more(readers, count);
        rung = bell_was_rung(b);
    }
    learn(s, now_ns() - parked);
    if (more) return 1;
    /* Rung by hand and interrupted at once: the ring is used up by now, so it has to end this very wait. */
    return slept == RING_INTERRUPTED && !rung ? RING_INTERRUPTED : 0;
}

int readers_wait(bell *b, lane_reader *const *readers, uint32_t count, int64_t timeout_ns) {
    int rc = bell_begin(b);
    if (rc != RING_OK) return rc;
    uint32_t entered = 0;
    while (entered < count && (rc = guard_enter(&readers[entered]->guard)) == RING_OK) entered++;
    if (entered == count) rc = wait_on(b, readers, count, timeout_ns);
    while (entered) guard_leave(&readers[--entered]->guard);
    bell_end(b);
    return rc;
}
