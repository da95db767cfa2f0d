/* Owner words, seen from outside a handle: who has a lane or a cursor, and letting go of a dead one's. */

#include "inner.h"

uint64_t lane_owner(const ring *r, uint32_t lane) { return peek(&lane_at(r, lane)->owner); }

uint64_t consumer_owner(const ring *r, uint32_t index) { return peek(&consumer_at(r, index)->owner); }

int consumer_detach(const ring *r, uint32_t index, uint64_t expected, uint64_t mine) {
    if (index >= r->consumers || mine == 0) return RING_ARGUMENT;
    consumer_block *c = consumer_at(r, index);
    /* Own it meanwhile: nobody may take the cursor over between the claim and the new state. */
    if (!claim_owner(&c->owner, expected, mine)) return RING_OWNED;
    poke_half(&c->parked, 0);
    store_state(&c->state, CURSOR_DETACHED);
    fence_detached();
    for (uint32_t lane = 0; lane < r->lanes; lane++) wake_writer(lane_at(r, lane));
    claim_owner(&c->owner, mine, 0);
    return RING_OK;
}
