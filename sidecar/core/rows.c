/* A scheduler's decode step, from its arrays to a sealed BATCH body in one pass.
 *
 * The body's layout is ring/batch.py's, the route bits are ring/route.py's: generation 28 | reader 8 |
 * shard 8 | slot 20. The table is private memory of the scheduler's process; routes come from its caller and
 * are checked before they index it. Arrays are numpy's: aligned, of the lengths the caller has checked. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "../../ring/core/check.h"
#include "api.h"

#define SLOT_BITS 20
#define READER_SHIFT 28

#define PREFIX_BYTES 16
#define ROW_BYTES 20

_Static_assert(sizeof(outfeed_slot) == 24, "numpy in sidecar/rows.py views the table with this layout");

static outfeed_slot *slot_of(const outfeed_table *table, uint64_t route) {
    uint32_t reader = (uint32_t)(route >> READER_SHIFT) & 0xffu;
    uint32_t slot = (uint32_t)route & ((1u << SLOT_BITS) - 1);
    if (route == 0 || reader >= table->readers || slot >= table->slots_each) return NULL;
    return &table->slots[(size_t)reader * table->slots_each + slot];
}

int64_t outfeed_rows_advance(outfeed_table *table, uint32_t rows, const void *routes, const void *counts,
                             uint32_t *first, uint32_t *prompt) {
    const uint64_t *route = routes;
    const uint32_t *count = counts;
    uint64_t tokens = 0, stale = 0;
    for (uint32_t row = 0; row < rows; row++) {
        outfeed_slot *slot = slot_of(table, route[row]);
        if (slot == NULL || slot->route == 0) {
            outfeed_rows_retract(table, row, routes, counts);
            return OUTFEED_ROUTE - (int64_t)row;
        }
        uint32_t more = count ? count[row] : 1;
        tokens += more;
        if (slot->route == route[row] && slot->live) {
            first[row] = slot->emitted;
            prompt[row] = slot->prompt;
            slot->emitted += more;
        } else {
            first[row] = 0;
            prompt[row] = 0;
            stale++;
        }
    }
    table->stale += stale;
    return (int64_t)tokens;
}

void outfeed_rows_retract(outfeed_table *table, uint32_t rows, const void *routes, const void *counts) {
    const uint64_t *route = routes;
    const uint32_t *count = counts;
    for (uint32_t row = 0; row < rows; row++) {
        outfeed_slot *slot = slot_of(table, route[row]);
        if (slot != NULL && slot->route == route[row] && slot->live) slot->emitted -= count ? count[row] : 1;
    }
}

int64_t outfeed_step(outfeed_table *table, const void *header, uint32_t header_len, uint32_t rows,
                     const void *routes, const void *counts, uint32_t tokens, const void *ids, void *out,
                     uint64_t room) {
    uint8_t *body = out;
    uint64_t padded = ((uint64_t)header_len + 7) & ~UINT64_C(7);
    uint64_t size = PREFIX_BYTES + padded + (uint64_t)rows * ROW_BYTES + (uint64_t)tokens * 4;
    if (size > room) return OUTFEED_ROOM;
    uint8_t *column = body + PREFIX_BYTES + padded;
    uint32_t *first = (uint32_t *)(void *)(column + 8 * (size_t)rows);
    uint32_t *count_column = first + rows, *prompt = count_column + rows;
    int64_t summed = outfeed_rows_advance(table, rows, routes, counts, first, prompt);
    if (summed < 0) return summed;
    if (summed != (int64_t)tokens) {
        outfeed_rows_retract(table, rows, routes, counts);
        return OUTFEED_TOKENS;
    }
    memcpy(body + PREFIX_BYTES, header, header_len);
    memset(body + PREFIX_BYTES + header_len, 0, padded - header_len);
    memcpy(column, routes, 8 * (size_t)rows);
    if (counts != NULL)
        memcpy(count_column, counts, 4 * (size_t)rows);
    else
        for (uint32_t row = 0; row < rows; row++) count_column[row] = 1;
    memcpy(prompt + rows, ids, 4 * (size_t)tokens);
    uint32_t lengths[2] = {header_len, (uint32_t)size};
    memcpy(body, lengths, sizeof lengths);
    uint64_t check = outfeed_check_bytes(body + PREFIX_BYTES, size - PREFIX_BYTES, header_len);
    memcpy(body + 8, &check, sizeof check);
    return (int64_t)size;
}
