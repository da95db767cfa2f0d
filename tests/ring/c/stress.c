/* Threads as writers and consumers of one ring, built under ThreadSanitizer and under Address- and
 * UBSanitizer. Every body is a function of its lane and number, and every consumer checks that it gets
 * each exactly once and in order, across claims given back and taken again, parks, full lanes,
 * reservations and wraps.
 *
 * usage: stress SEED MILLISECONDS      prints one line of counts; exit status 1 at the first fault */

#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "api.h"

enum { LANES = 3, CONSUMERS = 2, CAPACITY = 8192, LARGEST = 1500, END = 255 };

static ring shared;
static _Atomic int stop;
static _Atomic uint64_t written, received, parks, takeovers, full;
static uint64_t seed;

#define MUST(condition)                                                                            \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: %s does not hold (seed %llu)\n", __FILE__, __LINE__, #condition, \
                    (unsigned long long)seed);                                                     \
            _exit(1);                                                                              \
        }                                                                                          \
    } while (0)

static uint64_t next(uint64_t *state) {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

/* The body of frame `number` of a lane: its number, then a pattern; the length follows from both. */
static uint64_t body_of(uint32_t lane, uint64_t number, uint8_t *out) {
    uint64_t mix = (number * 0x9e3779b97f4a7c15u) ^ (lane + 1) * 0xbf58476d1ce4e5b9u;
    uint64_t size = 8 + (mix >> 33) % ((mix & 7) == 0 ? LARGEST - 8 : 120);
    memcpy(out, &number, 8);
    memset(out + 8, (int)(mix & 255), size - 8);
    return size;
}

static int claim_lane(uint32_t lane, lane_writer **w) {
    uint64_t owner = lane_owner(&shared, lane);
    return writer_claim(&shared, lane, owner, 1000 + lane, w);
}

static int write_body(lane_writer *w, uint64_t *rng, int tag, const uint8_t *body, uint64_t size) {
    if (next(rng) % 4 == 0) {
        uint64_t at;
        int rc = writer_reserve(w, size + next(rng) % 64, 20000000, &at);
        if (rc != RING_OK) return rc;
        if (next(rng) % 16 == 0) {
            MUST(writer_cancel(w) == RING_OK);
            return RING_FULL;
        }
        memcpy(shared.base + at, body, size);
        return writer_commit(w, tag, size);
    }
    uint64_t cut = next(rng) % (size + 1);
    part parts[3] = {{body, cut}, {NULL, 0}, {body + cut, size - cut}};
    return writer_write(w, tag, parts, 3, next(rng) % 2 ? 20000000 : 0);
}

static void *writing(void *argument) {
    uint32_t lane = (uint32_t)(uintptr_t)argument;
    uint64_t rng = seed * 31 + lane + 1, number = 0;
    uint8_t body[LARGEST];
    lane_writer *w;
    MUST(claim_lane(lane, &w) == RING_OK);
    for (int last = 0; !last;) {
        last = atomic_load(&stop);
        uint64_t size = body_of(lane, number, body);
        int rc;
        do {
            rc = write_body(w, &rng, last ? END : (int)(number % 200), body, size);
            if (rc == RING_FULL) atomic_fetch_add(&full, 1);
        } while (rc == RING_FULL);
        MUST(rc == RING_OK);
        number++;
        if (next(&rng) % 256 == 0) { /* give the lane up and take it again: the tail must carry over */
            MUST(writer_close(w) == RING_OK);
            MUST(writer_write(w, 0, NULL, 0, 0) == RING_CLOSED);
            writer_free(w);
            MUST(claim_lane(lane, &w) == RING_OK);
            atomic_fetch_add(&takeovers, 1);
        }
    }
    atomic_fetch_add(&written, number);
    writer_close(w);
    writer_free(w);
    return NULL;
}

typedef struct {
    uint64_t expected[LANES]; /* number of the next frame, as read */
    uint64_t released[LANES]; /* … as released: where a take-over starts again */
    int ended;
} progress;

static void check_frames(progress *p, const frames *f, int count) {
    uint8_t body[LARGEST];
    for (int i = 0; i < count; i++) {
        uint32_t lane = f->lane[i];
        uint64_t size = body_of(lane, p->expected[lane], body);
        MUST(f->end[i] - f->start[i] == size);
        MUST(memcmp(shared.base + f->start[i], body, size) == 0);
        MUST(f->tag[i] == END || f->tag[i] == p->expected[lane] % 200);
        p->expected[lane]++;
        p->ended += f->tag[i] == END;
    }
}

static void claim_cursor(uint32_t index, const char *bell_name, lane_reader **c) {
    uint64_t owner = consumer_owner(&shared, index);
    MUST(reader_claim(&shared, index, owner, 2000 + index, bell_name, c) == RING_OK);
}

static bell *make_bell(const char *name) {
    char path[80];
    snprintf(path, sizeof path, "/dev/shm/%s", name);
    int fd = open(path, O_CREAT | O_EXCL | O_RDWR, 0600);
    MUST(fd >= 0 && ftruncate(fd, RING_BELL_BYTES) == 0);
    void *base = mmap(NULL, RING_BELL_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    MUST(base != MAP_FAILED && bell_format(base, RING_BELL_BYTES, 1) == RING_OK);
    bell *b = bell_open(base, (int64_t)(seed % 3) * 20000);
    MUST(b != NULL);
    return b;
}

static void *reading(void *argument) {
    uint32_t index = (uint32_t)(uintptr_t)argument, lane_of[64], tag_of[64];
    uint64_t rng = seed * 17 + index + 99, start[64], end[64], tails[LANES];
    frames out = {lane_of, tag_of, start, end};
    progress p = {0};
    char name[64];
    snprintf(name, sizeof name, "outfeed-stress-%d-%u", (int)getpid(), index);
    bell *b = make_bell(name);
    lane_reader *c;
    claim_cursor(index, name, &c);
    while (p.ended < LANES) {
        const uint64_t *upto = NULL;
        if (next(&rng) % 2) {
            MUST(reader_tails(c, tails) == RING_OK);
            upto = tails;
        }
        int n = reader_read(c, (uint32_t)(1 + next(&rng) % 64), upto, &out);
        MUST(n >= 0);
        check_frames(&p, &out, n);
        if (next(&rng) % 8 || p.ended == LANES) {
            MUST(reader_release(c) == RING_OK);
            memcpy(p.released, p.expected, sizeof p.released);
        }
        if (next(&rng) % 512 == 0 && p.ended == 0) { /* die without releasing, come back */
            MUST(reader_close(c) == RING_OK);
            MUST(reader_read(c, 1, NULL, &out) == RING_CLOSED);
            reader_free(c);
            claim_cursor(index, name, &c);
            memcpy(p.expected, p.released, sizeof p.expected);
            atomic_fetch_add(&takeovers, 1);
        }
        if (n == 0 && p.ended < LANES) {
            MUST(readers_wait(b, &c, 1, 1000000000) >= 0);
            atomic_fetch_add(&parks, 1);
        }
        MUST(reader_release(c) == RING_OK);
        memcpy(p.released, p.expected, sizeof p.released);
    }
    for (int i = 0; i < LANES; i++) atomic_fetch_add(&received, p.expected[i]);
    reader_close(c);
    reader_free(c);
    bell_close(b);
    bell_free(b);
    char path[80];
    snprintf(path, sizeof path, "/dev/shm/%s", name);
    unlink(path);
    return NULL;
}

/* Statistics are read throughout, as any process may. */
static void *watching(void *argument) {
    (void)argument;
    while (!atomic_load(&stop)) {
        lane_stats l;
        consumer_stats k;
        for (uint32_t i = 0; i < LANES; i++) MUST(ring_lane_stats(&shared, i, &l) == RING_OK && l.used <= CAPACITY);
        for (uint32_t i = 0; i < CONSUMERS; i++) MUST(ring_consumer_stats(&shared, i, &k) == RING_OK);
        usleep(200);
    }
    return NULL;
}

int main(int argc, char **argv) {
    seed = argc > 1 ? strtoull(argv[1], NULL, 10) : 1;
    unsigned milliseconds = argc > 2 ? (unsigned)atoi(argv[2]) : 1000;
    uint64_t bytes = ring_bytes(LANES, CONSUMERS, CAPACITY), found[4];
    void *base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    MUST(base != MAP_FAILED);
    MUST(ring_format(base, bytes, LANES, CONSUMERS, CAPACITY, "stress", 1, 0) == RING_OK);
    MUST(ring_check(base, bytes, &shared, found) == RING_OK);
    pthread_t threads[LANES + CONSUMERS + 1];
    for (uintptr_t i = 0; i < LANES; i++) pthread_create(&threads[i], NULL, writing, (void *)i);
    for (uintptr_t i = 0; i < CONSUMERS; i++) pthread_create(&threads[LANES + i], NULL, reading, (void *)i);
    pthread_create(&threads[LANES + CONSUMERS], NULL, watching, NULL);
    usleep(milliseconds * 1000);
    atomic_store(&stop, 1);
    for (int i = 0; i < LANES + CONSUMERS + 1; i++) pthread_join(threads[i], NULL);
    MUST(atomic_load(&received) == CONSUMERS * atomic_load(&written));
    for (uint32_t i = 0; i < LANES; i++) {
        lane_stats l;
        MUST(ring_lane_stats(&shared, i, &l) == RING_OK);
        MUST(l.used == 0 && l.quarantine == 0 && l.owner == 0);
    }
    printf("written %llu received %llu waits %llu takeovers %llu full %llu\n", (unsigned long long)written,
           (unsigned long long)received, (unsigned long long)parks, (unsigned long long)takeovers,
           (unsigned long long)full);
    return 0;
}
