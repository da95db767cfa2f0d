/* A segment's header: writing a fresh one, refusing a wrong one. After ring_check the header is never
 * read again; what it said lives in the caller's `ring`, where no other process can change it. */

#include "inner.h"

#include <string.h>

static uint64_t align_up(uint64_t n, uint64_t to) { return (n + to - 1) & ~(to - 1); }

static uint64_t heads_offset(uint32_t lanes, uint32_t consumers) {
    return PAGE + (uint64_t)lanes * sizeof(lane_block) + (uint64_t)consumers * sizeof(consumer_block);
}

static uint64_t data_offset(uint32_t lanes, uint32_t consumers) {
    uint64_t heads = (uint64_t)lanes * consumers * sizeof(head_line);
    return align_up(heads_offset(lanes, consumers) + heads, PAGE);
}

uint64_t ring_bytes(uint32_t lanes, uint32_t consumers, uint64_t capacity) {
    if (lanes < 1 || lanes > RING_MAX_LANES || consumers < 1 || consumers > RING_MAX_CONSUMERS) return 0;
    if (capacity < RING_MIN_CAPACITY || capacity > RING_MAX_CAPACITY) return 0;
    if (capacity & (capacity - 1)) return 0;
    return data_offset(lanes, consumers) + (uint64_t)lanes * capacity;
}

static void fill(void *base, uint64_t bytes, uint32_t lanes, uint32_t consumers, uint64_t capacity, ring *out) {
    out->base = base;
    out->bytes = bytes;
    out->capacity = capacity;
    out->data = data_offset(lanes, consumers);
    out->heads = heads_offset(lanes, consumers);
    out->lanes = lanes;
    out->consumers = consumers;
}

int ring_format(void *base, uint64_t bytes, uint32_t lanes, uint32_t consumers, uint64_t capacity,
                const char *name, uint64_t creator, uint64_t space) {
    uint64_t needed = ring_bytes(lanes, consumers, capacity);
    if (needed == 0 || bytes != needed) return RING_GEOMETRY;
    header *h = base;
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    h->layout = RING_LAYOUT_VERSION;
    h->lanes = lanes;
    h->consumers = consumers;
    h->line = LINE;
    h->capacity = capacity;
    h->bytes = bytes;
    h->data = data_offset(lanes, consumers);
    h->created_ns = (uint64_t)((int64_t)t.tv_sec * NS_PER_S + t.tv_nsec);
    h->creator = creator;
    h->space = space;
    strncpy(h->name, name, sizeof h->name - 1);
    store_magic(&h->magic, MAGIC);
    return RING_OK;
}

int ring_check(void *base, uint64_t bytes, ring *out, uint64_t found[4]) {
    memset(found, 0, 4 * sizeof found[0]);
    if (bytes < PAGE) return RING_NOT_A_RING;
    header *h = base;
    found[0] = load_magic(&h->magic);
    if (found[0] != MAGIC) return RING_NOT_A_RING;
    /* Read each field once: what is checked is what is used, whatever another process writes meanwhile. */
    found[0] = *(volatile uint32_t *)&h->layout;
    if (found[0] != RING_LAYOUT_VERSION) return RING_VERSION;
    uint32_t lanes = *(volatile uint32_t *)&h->lanes;
    uint32_t consumers = *(volatile uint32_t *)&h->consumers;
    uint64_t capacity = *(volatile uint64_t *)&h->capacity;
    found[1] = lanes;
    found[2] = consumers;
    found[3] = capacity;
    uint64_t needed = ring_bytes(lanes, consumers, capacity);
    if (needed == 0 || needed != bytes) return RING_GEOMETRY;
    if (*(volatile uint64_t *)&h->bytes != bytes || *(volatile uint32_t *)&h->line != LINE ||
        *(volatile uint64_t *)&h->data != data_offset(lanes, consumers))
        return RING_GEOMETRY;
    fill(base, bytes, lanes, consumers, capacity, out);
    out->created_ns = *(volatile uint64_t *)&h->created_ns;
    out->space = *(volatile uint64_t *)&h->space;
    return RING_OK;
}

void quarantine(const ring *r, uint32_t lane, uint64_t position) {
    lane_block *l = lane_at(r, lane);
    claim_owner(&l->quarantine, 0, position | 1);
    /* A writer parked on a full lane must hear of it: nobody will ever make room. */
    fence_closed();
    wake_writer(l);
}
