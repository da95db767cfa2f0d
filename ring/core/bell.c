/* Sleeping and waking: a doorbell of each process's own for consumers, a futex for a writer without room.
 *
 * A doorbell belongs to a process, so one sleep covers every ring it reads. It is a small file in /dev/shm
 * with one word that counts, on which its owner sleeps (a futex, whose operation no byte of the file has a say
 * in). A full lane concerns one writer and needs no name: its word in the lane is the futex.
 *
 * The word has two bits. Who rings sets RUNG and makes the wake-up call only if ASLEEP was set; who goes to
 * sleep sets ASLEEP and does so only if RUNG was not. Both are one locked step on the same word, so one comes
 * first and the other sees it; between the sleeper's step and its sleep the kernel compares once more. Any
 * other value is as good as none: it costs a needless call, or at most the sleep's own bound. */

#include "inner.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define FIRST_SPIN_NS 5000

static_assert(RING_BELL_BYTES == sizeof(bell_block), "layout");

struct bell {
    guard guard;
    bell_block *shared;
    spinning spin;
    half rung; /* by bell_ring: return from the wait even with nothing to read */
};

int bell_name_ok(const char *name, size_t bytes) {
    size_t length = strnlen(name, bytes);
    if (length == 0 || length == bytes) return 0;
    for (size_t i = 0; i < length; i++) {
        char c = name[i];
        int plain = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
        if (!plain && (i == 0 || (c != '-' && c != '_' && c != '.'))) return 0;
    }
    return 1;
}

int bell_format(void *base, uint64_t bytes, uint64_t owner) {
    if (bytes != sizeof(bell_block)) return RING_GEOMETRY;
    bell_block *b = base;
    poke(&b->owner, owner);
    store_magic(&b->magic, BELL_MAGIC);
    return RING_OK;
}

int bell_check(const void *base, uint64_t bytes) {
    if (bytes != sizeof(bell_block)) return RING_NO_BELL;
    return load_magic(&((const bell_block *)base)->magic) == BELL_MAGIC ? RING_OK : RING_NO_BELL;
}

uint64_t bell_owner(const void *base) { return peek(&((const bell_block *)base)->owner); }

int bell_claim(void *base, uint64_t expected, uint64_t mine) {
    return claim_owner(&((bell_block *)base)->owner, expected, mine) ? RING_OK : RING_OWNED;
}

/* Map a doorbell by a name that may come from shared memory: nothing but one of this user's own, of the right
 * size (touching the map of a shorter file is a SIGBUS) and with the right magic. RING_NO_MEMORY says nothing of the
 * doorbell: this process, or the machine, is at a limit. */
static int map_bell(const char *name, bell_block **out) {
    char path[RING_NAME_BYTES + 16];
    struct stat st;
    snprintf(path, sizeof path, "/dev/shm/%s", name);
    /* O_NONBLOCK: whatever has the name, opening it never waits. */
    int fd = open(path, O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0) return errno == EMFILE || errno == ENFILE || errno == ENOMEM ? RING_NO_MEMORY : RING_NO_BELL;
    int usable = fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && st.st_size == (off_t)sizeof(bell_block) &&
                 st.st_uid == geteuid() && (st.st_mode & 077) == 0;
    void *b = usable ? mmap(NULL, sizeof(bell_block), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) : NULL;
    close(fd);
    if (!usable) return RING_NO_BELL;
    if (b == MAP_FAILED) return RING_NO_MEMORY;
    if (bell_check(b, sizeof(bell_block)) != RING_OK) {
        munmap(b, sizeof(bell_block));
        return RING_NO_BELL;
    }
    *out = b;
    return RING_OK;
}

bell *bell_open(void *base, int64_t longest_spin_ns) {
    bell *b = calloc(1, sizeof *b);
    if (b == NULL) return NULL;
    guard_init(&b->guard);
    b->shared = base;
    b->spin.longest_ns = longest_spin_ns;
    b->spin.next_ns = longest_spin_ns < FIRST_SPIN_NS ? longest_spin_ns : FIRST_SPIN_NS;
    return b;
}

void bell_close(bell *b) { atomic_store(&b->guard.closed, 1); }

void bell_free(bell *b) { free(b); }

static void call(bell_block *b) {
    if (ring_bell(&b->call) & BELL_ASLEEP) futex_wake(&b->call);
}

int bell_ring(bell *b) {
    if (atomic_load(&b->guard.closed)) return RING_CLOSED;
    set_flag(&b->rung);
    call(b->shared);
    return RING_OK;
}

int bell_sleep(bell *b, int64_t deadline) {
    half *called = &b->shared->call;
    if (turn_bell(called, BELL_ASLEEP) & BELL_RUNG) {
        turn_bell(called, 0);
        return RING_OK;
    }
    int64_t left = deadline - now_ns();
    int rc = left > 0 ? futex_sleep(called, BELL_ASLEEP, left) : RING_FULL;
    int rung = turn_bell(called, 0) & BELL_RUNG;
    return rung && rc == RING_FULL ? RING_OK : rc;
}

void caller_close(caller *cached) {
    if (cached->bell != NULL) munmap(cached->bell, sizeof *cached->bell);
    cached->bell = NULL;
    cached->turn = 0;
}

static void caller_open(consumer_block *c, caller *cached, uint32_t turn) {
    bell_name name;
    caller_close(cached);
    for (int i = 0; i < 8; i++) name.words[i] = peek(&c->bell[i]);
    /* Torn while it was being rewritten: its writer is awake then, and looks before it sleeps. */
    if (load_turn_again(&c->bell_turn) != turn || !bell_name_ok(name.text, sizeof name.text)) return;
    /* Remember a failure too, so that a dead consumer's name is not looked up on every write; not that there was
     * no descriptor to be had just now, or its consumer would not be rung until it changes hands. */
    if (map_bell(name.text, &cached->bell) != RING_NO_MEMORY) cached->turn = turn;
}

void call_consumer(consumer_block *c, caller *cached) {
    uint32_t turn = load_turn(&c->bell_turn);
    if (turn & 1) return;
    if (turn != cached->turn) caller_open(c, cached, turn);
    if (cached->bell != NULL) call(cached->bell);
}

int futex_sleep(half *flag, uint32_t expected, int64_t timeout_ns) {
    struct timespec t = {.tv_sec = timeout_ns / NS_PER_S, .tv_nsec = timeout_ns % NS_PER_S};
    if (syscall(SYS_futex, flag, FUTEX_WAIT, expected, &t, NULL, 0) == 0) return RING_OK;
    if (errno == EINTR) return RING_INTERRUPTED;
    return errno == ETIMEDOUT ? RING_FULL : RING_OK;
}

void futex_wake(half *flag) { syscall(SYS_futex, flag, FUTEX_WAKE, 1, NULL, NULL, 0); }

/* One waiter at a time: claim the bell and forget old rings. What they were for is seen by the look that
 * follows, because forgetting is a turn_bell too. */
int bell_begin(bell *b) {
    int rc = guard_enter(&b->guard);
    if (rc != RING_OK) return rc;
    if (peek_half(&b->shared->call) != 0) turn_bell(&b->shared->call, 0);
    return RING_OK;
}

void bell_end(bell *b) { guard_leave(&b->guard); }

int bell_was_rung(bell *b) { return peek_half(&b->rung) && take_flag(&b->rung); }

spinning *bell_spin(bell *b) { return &b->spin; }
