/* The scheduler's row table: `first` and prompt tokens of a whole step in one pass.
 *
 * Route bits are those of ring/route.py: generation 28 | reader 8 | shard 8 | slot 20. The table is private
 * memory of the scheduler's process; routes come from its caller and are checked before they index it. */
#include <stddef.h>
#include <stdint.h>

#include "api.h"

#define SLOT_BITS 20
#define READER_SHIFT 28

_Static_assert(sizeof(outfeed_slot) == 24, "numpy in sidecar/rows.py views the table with this layout");

static outfeed_slot *slot_of(outfeed_slot *table, uint32_t readers, uint32_t slots, uint64_t route) {
    uint32_t reader = (uint32_t)(route >> READER_SHIFT) & 0xffu;
    uint32_t slot = (uint32_t)route & ((1u << SLOT_BITS) - 1);
    if (route == 0 || reader >= readers || slot >= slots) return NULL;
    return &table[(size_t)reader * slots + slot];
}

int64_t outfeed_rows_advance(outfeed_slot *table, uint32_t readers, uint32_t slots, uint32_t rows,
                             const uint64_t *routes, const uint32_t *counts, uint32_t *first,
                             uint32_t *prompt, uint32_t *stale) {
    int64_t tokens = 0;
    *stale = 0;
    for (uint32_t row = 0; row < rows; row++) {
        outfeed_slot *slot = slot_of(table, readers, slots, routes[row]);
        if (slot == NULL || slot->route == 0) {
            outfeed_rows_retract(table, slots, row, routes, counts);
            return -1 - (int64_t)row;
        }
        uint32_t count = counts[row];
        tokens += count;
        if (slot->route == routes[row] && slot->live) {
            first[row] = slot->emitted;
            prompt[row] = slot->prompt;
            slot->emitted += count;
        } else {
            first[row] = 0;
            prompt[row] = 0;
            (*stale)++;
        }
    }
    return tokens;
}

void outfeed_rows_retract(outfeed_slot *table, uint32_t slots, uint32_t rows, const uint64_t *routes,
                          const uint32_t *counts) {
    for (uint32_t row = 0; row < rows; row++) {
        outfeed_slot *slot = slot_of(table, 256, slots, routes[row]);
        if (slot->route == routes[row] && slot->live) slot->emitted -= counts[row];
    }
}
