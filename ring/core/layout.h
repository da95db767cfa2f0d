/* The segment's bytes. Nothing here moves data; every offset has a name and an assertion.
 *
 * All integers are little-endian (the build refuses another order). LINE is 128 bytes: two cache lines,
 * because the adjacent-line prefetcher pairs them. Whatever two processes touch has a line of its own.
 *
 *   0        ┌──────────────────────────────────────────────────────────┐
 *            │ header page: magic, version, geometry, name              │  4096 bytes, written once
 *   4096     ├──────────────────────────────────────────────────────────┤
 *            │ lane table: lanes × 4 lines                              │
 *            │   tail │ owner, quarantine │ room │ statistics           │
 *            ├──────────────────────────────────────────────────────────┤
 *            │ consumer table: consumers × 3 lines                      │
 *            │   parked │ owner, state, doorbell │ statistics           │
 *            ├──────────────────────────────────────────────────────────┤
 *   heads    │ heads: consumers × lanes × 1 line (consumer-major)       │
 *            ├──────────────────────────────────────────────────────────┤
 *   data     │ lane 0's area: capacity bytes, page-aligned              │
 *            │ lane 1's area …                                          │
 *   bytes    └──────────────────────────────────────────────────────────┘
 *
 * Positions (tails, heads, seq) are byte counts since the ring was made; they only grow, and position p
 * lies at area[p & (capacity - 1)]. 64 bits of them outlast any machine.
 *
 *   record    0        4    5     6          8                16
 *            ┌────────┬────┬─────┬──────────┬────────────────┬──────────────┬ ─ ─ ┐
 *            │body_len│tag │flags│ reserved │ seq            │ body         │ pad │
 *            └────────┴────┴─────┴──────────┴────────────────┴──────────────┴ ─ ─ ┘
 *
 * A record starts on a multiple of 16 and is padded to one, so what is left at the end of an area
 * always holds a header. `seq` is the record's own position: it must equal where the record lies, so it
 * is contiguous by construction, tells stale bytes from fresh ones, and a writer that takes a lane over
 * needs no counter. A record never wraps: one that would is preceded by a padding record (flag PAD)
 * that fills the area. Both become visible by the same store of the tail. */

#ifndef OUTFEED_RING_LAYOUT_H
#define OUTFEED_RING_LAYOUT_H

#include <assert.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "outfeed's shared memory is little-endian"
#endif

#define LINE 128
#define PAGE 4096
#define MAGIC UINT64_C(0x474e49524654554f) /* "OUTFRING" */

typedef _Atomic uint64_t word;
typedef _Atomic uint32_t half;

typedef struct header {
    word magic; /* stored last */
    uint32_t layout;
    uint32_t lanes;
    uint32_t consumers;
    uint32_t line;
    uint64_t capacity;
    uint64_t bytes;
    uint64_t data;
    uint64_t created_ns; /* CLOCK_REALTIME */
    uint64_t creator;    /* owner word */
    char name[64];
    uint64_t space; /* what its pids count in: owner.py */
    uint8_t rest[PAGE - 136];
} header;

static_assert(offsetof(header, magic) == 0, "layout");
static_assert(offsetof(header, layout) == 8, "layout");
static_assert(offsetof(header, lanes) == 12, "layout");
static_assert(offsetof(header, consumers) == 16, "layout");
static_assert(offsetof(header, line) == 20, "layout");
static_assert(offsetof(header, capacity) == 24, "layout");
static_assert(offsetof(header, bytes) == 32, "layout");
static_assert(offsetof(header, data) == 40, "layout");
static_assert(offsetof(header, created_ns) == 48, "layout");
static_assert(offsetof(header, creator) == 56, "layout");
static_assert(offsetof(header, name) == 64, "layout");
static_assert(offsetof(header, space) == 128, "layout");
static_assert(sizeof(header) == PAGE, "layout");

typedef struct lane_block {
    /* The writer stores, every consumer loads. */
    _Alignas(LINE) word tail;
    /* Rarely written: by a claim, or by whoever finds the lane corrupt. */
    _Alignas(LINE) word owner;
    word quarantine; /* position | 1, or 0 */
    /* The writer parks here when the lane is full; a consumer that releases wakes it. A futex. */
    _Alignas(LINE) half room_parked;
    word room_wanted; /* how far every head must be before waking the writer is worth it */
    /* The writer alone stores. */
    _Alignas(LINE) word frames;
    word body_bytes;
    word full_events;
    word full_ns;
    word high_water;
    word bells_rung;
    word takeovers;
} lane_block;

static_assert(offsetof(lane_block, tail) == 0, "layout");
static_assert(offsetof(lane_block, owner) == 128, "layout");
static_assert(offsetof(lane_block, quarantine) == 136, "layout");
static_assert(offsetof(lane_block, room_parked) == 256, "layout");
static_assert(offsetof(lane_block, room_wanted) == 264, "layout");
static_assert(offsetof(lane_block, frames) == 384, "layout");
static_assert(offsetof(lane_block, body_bytes) == 392, "layout");
static_assert(offsetof(lane_block, full_events) == 400, "layout");
static_assert(offsetof(lane_block, full_ns) == 408, "layout");
static_assert(offsetof(lane_block, high_water) == 416, "layout");
static_assert(offsetof(lane_block, bells_rung) == 424, "layout");
static_assert(offsetof(lane_block, takeovers) == 432, "layout");
static_assert(sizeof(lane_block) == 4 * LINE, "layout");

/* OPENING: attached again, its heads are not to be relied on yet. */
enum { CURSOR_OPEN = 0, CURSOR_DETACHED = 1, CURSOR_OPENING = 2 };

typedef struct consumer_block {
    /* The consumer sets it before it sleeps; the writer that clears it rings the doorbell. */
    _Alignas(LINE) half parked;
    /* Written by a claim or a detach. */
    _Alignas(LINE) word owner;
    half state;     /* CURSOR_*: a detached cursor holds no writer back */
    half bell_turn; /* odd while the name is being written */
    word bell[8];   /* the doorbell's name, NUL-padded */
    /* The consumer alone stores. */
    _Alignas(LINE) word frames;
    word body_bytes;
    word batches;
    word parks;
    word wakes;
    word takeovers;
} consumer_block;

static_assert(offsetof(consumer_block, parked) == 0, "layout");
static_assert(offsetof(consumer_block, owner) == 128, "layout");
static_assert(offsetof(consumer_block, state) == 136, "layout");
static_assert(offsetof(consumer_block, bell_turn) == 140, "layout");
static_assert(offsetof(consumer_block, bell) == 144, "layout");
static_assert(offsetof(consumer_block, frames) == 256, "layout");
static_assert(offsetof(consumer_block, body_bytes) == 264, "layout");
static_assert(offsetof(consumer_block, batches) == 272, "layout");
static_assert(offsetof(consumer_block, parks) == 280, "layout");
static_assert(offsetof(consumer_block, wakes) == 288, "layout");
static_assert(offsetof(consumer_block, takeovers) == 296, "layout");
static_assert(sizeof(consumer_block) == 3 * LINE, "layout");

typedef struct head_line {
    _Alignas(LINE) word head; /* the consumer stores, the writer loads */
    word high_water;          /* most bytes this consumer ever found waiting in the lane */
} head_line;

static_assert(offsetof(head_line, head) == 0, "layout");
static_assert(offsetof(head_line, high_water) == 8, "layout");
static_assert(sizeof(head_line) == LINE, "layout");

/* A doorbell: a file of its own, of just these bytes. */
#define BELL_MAGIC UINT64_C(0x4c4c45424654554f) /* "OUTFBELL" */

enum { BELL_RUNG = 1, BELL_ASLEEP = 2 };

typedef struct bell_block {
    _Alignas(LINE) word magic;
    word owner;
    /* BELL_*. The owner sleeps on it, whoever has something for it rings: a futex. */
    _Alignas(LINE) half call;
} bell_block;

static_assert(offsetof(bell_block, magic) == 0, "layout");
static_assert(offsetof(bell_block, owner) == 8, "layout");
static_assert(offsetof(bell_block, call) == 128, "layout");
static_assert(sizeof(bell_block) == 2 * LINE, "layout");

typedef struct record {
    uint32_t body_len;
    uint8_t tag;
    uint8_t flags;
    uint16_t reserved; /* 0 */
    uint64_t seq;
} record;

enum { RECORD_PAD = 1 };

static_assert(offsetof(record, body_len) == 0, "layout");
static_assert(offsetof(record, tag) == 4, "layout");
static_assert(offsetof(record, flags) == 5, "layout");
static_assert(offsetof(record, reserved) == 6, "layout");
static_assert(offsetof(record, seq) == 8, "layout");
static_assert(sizeof(record) == 16, "layout");
static_assert(sizeof(word) == 8 && sizeof(half) == 4, "atomics are plain words in memory");
static_assert(ATOMIC_LLONG_LOCK_FREE == 2 && ATOMIC_INT_LOCK_FREE == 2, "no lock of one process guards a word of many");
static_assert(sizeof(void *) == 8, "a segment may be 256 GiB, and a futex takes a 64-bit machine's timespec");

#endif
