/* Owner words, seen from outside a handle: who has a lane or a cursor, and letting go of a dead one's. */

#include "inner.h"

uint64_t lane_owner(const ring *r, uint32_t lane) { return peek(&lane_at(r, lane)->owner); }

uint64_t consumer_owner(const ring *r, uint32_t index) { return peek(&consumer_at(r, index)->owner); }

int consumer_is_detached(const ring *r, uint32_t index) {
    return load_state(&consumer_at(r, index)->state) == CURSOR_DETACHED;
}

int consumer_detach(const ring *r, uint32_t index, uint64_t expected) {
    if (index >= r->consumers) return RING_ARGUMENT;
    consumer_block *c = consumer_at(r, index);
    /* Swapping the word for nobody settles a race with a process that takes the cursor over. */
    if (!claim_owner(&c->owner, expected, 0)) return RING_OWNED;
    poke_half(&c->parked, 0);
    store_state(&c->state, CURSOR_DETACHED);
    fence_released();
    for (uint32_t lane = 0; lane < r->lanes; lane++) {
        lane_block *l = lane_at(r, lane);
        if (peek_half(&l->room_parked) && take_flag(&l->room_parked)) futex_wake(&l->room_parked);
    }
    return RING_OK;
}
