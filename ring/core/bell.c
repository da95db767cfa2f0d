/* Sleeping and waking: named semaphores as doorbells for consumers, a futex for a writer without room.
 *
 * A doorbell belongs to a process, so one sleep covers every ring it reads. A full lane concerns one
 * writer and needs no name: its word in the lane is the futex. */

#include "inner.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define FIRST_SPIN_NS 5000

struct bell {
    guard guard;
    sem_t *semaphore;
    spinning spin;
    half rung; /* by bell_ring: return from the wait even with nothing to read */
};

static struct timespec until(int64_t deadline) {
    struct timespec t = {.tv_sec = deadline / NS_PER_S, .tv_nsec = deadline % NS_PER_S};
    return t;
}

int bell_name_ok(const char *name, size_t bytes) {
    size_t length = strnlen(name, bytes);
    if (length < 2 || length == bytes || name[0] != '/') return 0;
    for (size_t i = 1; i < length; i++) {
        char c = name[i];
        int plain = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
        if (!plain && c != '-' && c != '_' && (c != '.' || i == 1)) return 0;
    }
    return 1;
}

/* Open a semaphore by a name that may come from shared memory. sem_open maps a file of any length, and
 * touching the map of one too short is a SIGBUS: look first. */
static sem_t *open_semaphore(const char *name) {
    char path[RING_NAME_BYTES + 16];
    struct stat st;
    snprintf(path, sizeof path, "/dev/shm/sem.%s", name + 1);
    if (lstat(path, &st) != 0 || !S_ISREG(st.st_mode) || st.st_size < (off_t)sizeof(sem_t)) return NULL;
    sem_t *s = sem_open(name, 0);
    return s == SEM_FAILED ? NULL : s;
}

bell *bell_open(const char *name, int64_t longest_spin_ns) {
    if (!bell_name_ok(name, RING_NAME_BYTES)) return NULL;
    bell *b = calloc(1, sizeof *b);
    if (b == NULL) return NULL;
    guard_init(&b->guard);
    b->spin.longest_ns = longest_spin_ns;
    b->spin.next_ns = longest_spin_ns < FIRST_SPIN_NS ? longest_spin_ns : FIRST_SPIN_NS;
    b->semaphore = open_semaphore(name);
    if (b->semaphore == NULL) {
        free(b);
        return NULL;
    }
    return b;
}

void bell_close(bell *b) { atomic_store(&b->guard.closed, 1); }

void bell_free(bell *b) {
    if (b == NULL) return;
    if (b->semaphore != NULL) sem_close(b->semaphore);
    free(b);
}

int bell_ring(bell *b) {
    if (atomic_load(&b->guard.closed)) return RING_CLOSED;
    set_flag(&b->rung);
    sem_post(b->semaphore);
    return RING_OK;
}

int bell_sleep(bell *b, int64_t deadline) {
    struct timespec t = until(deadline);
    if (sem_clockwait(b->semaphore, CLOCK_MONOTONIC, &t) == 0) return RING_OK;
    return errno == EINTR ? RING_INTERRUPTED : RING_FULL;
}

void caller_close(caller *cached) {
    if (cached->semaphore != NULL) sem_close(cached->semaphore);
    cached->semaphore = NULL;
    cached->turn = 0;
}

static void caller_open(consumer_block *c, caller *cached, uint32_t turn) {
    union {
        uint64_t words[8];
        char text[RING_NAME_BYTES];
    } name;
    caller_close(cached);
    for (int i = 0; i < 8; i++) name.words[i] = peek(&c->bell[i]);
    /* Torn while it was being rewritten: its writer is awake then, and looks before it sleeps. */
    if (load_turn_again(&c->bell_turn) != turn || !bell_name_ok(name.text, sizeof name.text)) return;
    cached->semaphore = open_semaphore(name.text);
    /* Remember a failure too, so that a dead consumer's name is not looked up on every write. */
    cached->turn = turn;
}

void call_consumer(consumer_block *c, caller *cached) {
    uint32_t turn = load_turn(&c->bell_turn);
    if (turn & 1) return;
    if (turn != cached->turn) caller_open(c, cached, turn);
    if (cached->semaphore != NULL) sem_post(cached->semaphore);
}

int futex_sleep(half *flag, uint32_t expected, int64_t timeout_ns) {
    struct timespec t = until(timeout_ns);
    if (syscall(SYS_futex, flag, FUTEX_WAIT, expected, &t, NULL, 0) == 0) return RING_OK;
    if (errno == EINTR) return RING_INTERRUPTED;
    return errno == ETIMEDOUT ? RING_FULL : RING_OK;
}

void futex_wake(half *flag) { syscall(SYS_futex, flag, FUTEX_WAKE, 1, NULL, NULL, 0); }

/* One waiter at a time: claim the bell and forget old rings, which were for what is read by now. */
int bell_begin(bell *b) {
    int rc = guard_enter(&b->guard);
    if (rc != RING_OK) return rc;
    for (int i = 0; i < 64 && sem_trywait(b->semaphore) == 0; i++) continue;
    return RING_OK;
}

void bell_end(bell *b) { guard_leave(&b->guard); }

int bell_was_rung(bell *b) { return peek_half(&b->rung) && take_flag(&b->rung); }

spinning *bell_spin(bell *b) { return &b->spin; }
