/* The requests of one shard, keyed by (reader, slot) and verified by the whole route.
 *
 * Two levels: a reader's directory of pages, pages of 256 slots made on first use and freed with their last
 * request. Memory follows what is used, and a corrupt control frame can cost a page, not the machine.
 */
#ifndef OUTFEED_SLOTS_H
#define OUTFEED_SLOTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "stops.h"

#define SLOT_BITS 20
#define SHARD_BITS 8
#define READER_BITS 8
#define PAGE_BITS 8
#define PAGE_SLOTS (1u << PAGE_BITS)
#define READER_PAGES (1u << (SLOT_BITS - PAGE_BITS))
#define READERS (1u << READER_BITS)
/* 8192 pages hold two million requests in 80 MB. */
#define MAX_PAGES 8192u

/* A byte-fallback run is held whole until it ends, because its last byte decides what the first becomes. Past
 * this many bytes what is complete goes out, so that text flows whatever the model does. */
#define RUN_MAX 256u

enum {
    SLOT_ENDED = 1,       /* finished, stopped or failed: later rows are dropped */
    SLOT_STARTED = 2,     /* a token was decoded: the first-token forms no longer apply */
    SLOT_PROMPT_TAIL = 4, /* the held beginning of a character came from the prompt */
    SLOT_RUN = 8,         /* inside a run of byte tokens, valid so far */
    SLOT_BROKEN = 16,     /* inside a run of byte tokens that is no UTF-8 */
};

/* What few requests need. */
typedef struct {
    stop_set *stops;
    uint32_t node;     /* the automaton's state after all text so far */
    uint32_t least;    /* tokens before which a stop string that is found is text */
    uint8_t *held;     /* text not sent: could become a stop, or is owed after a restore */
    uint32_t held_len, held_cap;
    uint64_t skip;     /* bytes of text that the client has already */
    uint32_t run_len;
    uint32_t run_prompt; /* how many of the run's bytes are the prompt's */
    uint8_t run[RUN_MAX];
} slot_extra;

typedef struct {
    uint64_t route; /* 0: free */
    uint32_t expected;
    uint8_t state, flags, strip_left, tail_len;
    uint8_t tail[4];
    slot_extra *extra;
} slot;

_Static_assert(sizeof(slot) == 32, "two requests to a cache line");

typedef struct {
    uint32_t live;
    slot slots[PAGE_SLOTS];
} slot_page;

typedef struct {
    slot_page **readers[READERS];
    uint64_t live, pages;
} slot_table;

static inline uint32_t route_slot(uint64_t route) { return (uint32_t)(route & ((1u << SLOT_BITS) - 1)); }
static inline uint32_t route_shard(uint64_t route)
{
    return (uint32_t)(route >> SLOT_BITS) & ((1u << SHARD_BITS) - 1);
}
static inline uint32_t route_reader(uint64_t route)
{
    return (uint32_t)(route >> (SLOT_BITS + SHARD_BITS)) & (READERS - 1);
}

/* Whether a request's text goes out as it is made: nothing to look for, nothing held or owed, nothing to skip. */
static inline bool slot_plain(const slot *s)
{
    const slot_extra *extra = s->extra;
    return !extra || (!extra->stops && !extra->held_len && !extra->skip);
}

/* The request of this route, or NULL. */
static inline slot *slots_find(const slot_table *t, uint64_t route)
{
    slot_page **pages = t->readers[route_reader(route)];
    slot_page *page = pages ? pages[route_slot(route) >> PAGE_BITS] : NULL;
    slot *s = page ? &page->slots[route_slot(route) & (PAGE_SLOTS - 1)] : NULL;
    return s && s->route == route && route ? s : NULL;
}

/* Bring a request near before its row's turn. */
static inline void slots_prefetch(const slot_table *t, uint64_t route)
{
    slot_page **pages = t->readers[route_reader(route)];
    slot_page *page = pages ? pages[route_slot(route) >> PAGE_BITS] : NULL;
    if (page) __builtin_prefetch(&page->slots[route_slot(route) & (PAGE_SLOTS - 1)]);
}

/* The place for a new request, cleared; what an earlier generation left there is gone. NULL: no memory, or
 * too many pages. */
slot *slots_take(slot_table *t, uint64_t route);
bool slots_drop(slot_table *t, uint64_t route);
void slots_free(slot_table *t);
slot_extra *slot_need_extra(slot *s);

#endif
