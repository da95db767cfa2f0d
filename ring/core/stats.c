/* Statistics: plain loads of words that their owners store; nobody is stopped or slowed. */

#include "inner.h"

#include <string.h>

static int is_detached(const ring *r, uint32_t index) {
    return load_state(&consumer_at(r, index)->state) == CURSOR_DETACHED;
}

int ring_lane_stats(const ring *r, uint32_t lane, lane_stats *out) {
    if (lane >= r->lanes) return RING_ARGUMENT;
    const lane_block *l = lane_at(r, lane);
    memset(out, 0, sizeof *out);
    out->owner = peek(&l->owner);
    out->frames = peek(&l->frames);
    out->bytes = peek(&l->body_bytes);
    out->full_events = peek(&l->full_events);
    out->full_ns = peek(&l->full_ns);
    out->high_water = peek(&l->high_water);
    out->bells_rung = peek(&l->bells_rung);
    out->takeovers = peek(&l->takeovers);
    out->quarantine = peek(&l->quarantine);
    for (uint32_t i = 0; i < r->consumers; i++) {
        uint64_t seen = peek(&head_at(r, i, lane)->high_water);
        if (seen > out->high_water) out->high_water = seen;
        if (is_detached(r, i)) continue;
        /* The head first: the tail only grows, so what lies between is never negative. */
        uint64_t head = load_head(&head_at(r, i, lane)->head);
        uint64_t tail = load_tail(&l->tail);
        if (sane_span(r, head, tail) && tail - head > out->used) out->used = tail - head;
    }
    out->tail = load_tail(&l->tail);
    if (out->used > out->high_water) out->high_water = out->used;
    return RING_OK;
}

int ring_consumer_stats(const ring *r, uint32_t index, consumer_stats *out) {
    if (index >= r->consumers) return RING_ARGUMENT;
    const consumer_block *c = consumer_at(r, index);
    memset(out, 0, sizeof *out);
    out->owner = peek(&c->owner);
    out->detached = (uint64_t)is_detached(r, index);
    out->parked = peek_half(&c->parked);
    out->frames = peek(&c->frames);
    out->bytes = peek(&c->body_bytes);
    out->batches = peek(&c->batches);
    out->parks = peek(&c->parks);
    out->wakes = peek(&c->wakes);
    out->takeovers = peek(&c->takeovers);
    for (uint32_t lane = 0; lane < r->lanes && !out->detached; lane++) {
        uint64_t head = load_head(&head_at(r, index, lane)->head);
        uint64_t tail = load_tail(&lane_at(r, lane)->tail);
        if (sane_span(r, head, tail)) out->lag += tail - head;
    }
    return RING_OK;
}
