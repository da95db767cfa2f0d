/* A scheduler's decode step, from its arrays to a sealed BATCH body in one pass.
 *
 * The body's layout is ring/core/batch.h's, the route bits are ring/route.py's: generation 28 | reader 8 |
 * shard 8 | slot 20. The table is private memory of the scheduler's process; routes come from its caller and
 * are checked before they index it. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "../../ring/core/batch.h"
#include "api.h"

#define SLOT_BITS 20
#define READER_SHIFT 28
#define GENERATION_SHIFT 36

/* The msgpack header, all of it but the endings and the families: numbers have their widest form, so its size is
 * fixed. An array's mark, the version, the stamp, rows, tokens; behind either of those two a nil. */
#define HEADER_BYTES (1 + 1 + (1 + 8) + (1 + 4) + (1 + 4) + 2)

_Static_assert(sizeof(outfeed_slot) == 24, "numpy in sidecar/rows.py views the table with this layout");

/* NULL for a place that the table has not. */
static outfeed_slot *place_of(const outfeed_table *table, uint64_t route) {
    uint32_t reader = (uint32_t)(route >> READER_SHIFT) & 0xffu;
    uint32_t slot = (uint32_t)route & ((1u << SLOT_BITS) - 1);
    if (reader >= table->readers || slot >= table->slots_each) return NULL;
    return &table->slots[(size_t)reader * table->slots_each + slot];
}

/* An element of a caller's column, which may lie at any address: a view into bytes need not be aligned. */
static uint64_t route_at(const void *column, uint32_t row) {
    uint64_t route;
    memcpy(&route, (const uint8_t *)column + 8 * (size_t)row, sizeof route);
    return route;
}

/* No counts: one token each. */
static uint32_t count_at(const void *column, uint32_t row) {
    uint32_t count = 1;
    if (column != NULL) memcpy(&count, (const uint8_t *)column + 4 * (size_t)row, sizeof count);
    return count;
}

static int is_route(uint64_t route) { return route >> GENERATION_SHIFT != 0; }

/* NULL for what is no route of the table. */
static outfeed_slot *slot_of(const outfeed_table *table, uint64_t route) {
    return is_route(route) ? place_of(table, route) : NULL;
}

static int has(const outfeed_slot *slot, uint64_t route) { return slot->route == route && slot->live; }

static int has_rows(const outfeed_slot *slot) {
    return slot->live == OUTFEED_GENERATE || slot->live == OUTFEED_RECEIVED;
}

/* Whether the table counts it among the live ones. */
static int is_counted(const outfeed_slot *slot) { return slot->live && slot->live != OUTFEED_RECEIVED; }

/* Eight at a time: at -O2 a loop over single ids would be a few percent of a step. */
static int any_negative(const uint8_t *ids, uint32_t tokens) {
    uint64_t both = 0, eight[4];
    uint32_t one, i = 0;
    for (; i + 8 <= tokens; i += 8) {
        memcpy(eight, ids + 4 * (size_t)i, sizeof eight);
        both |= (eight[0] | eight[1]) | (eight[2] | eight[3]);
    }
    for (; i < tokens; i++) {
        memcpy(&one, ids + 4 * (size_t)i, sizeof one);
        both |= one;
    }
    return (both & 0x8000000080000000u) != 0;
}

int outfeed_rows_open(outfeed_table *table, uint64_t route, uint32_t prompt, uint32_t kind) {
    outfeed_slot *slot = slot_of(table, route);
    if (slot == NULL) return -1;
    if (has(slot, route)) return 0; /* a GENERATE that comes again after a take-over changes nothing */
    table->live -= is_counted(slot); /* one whose end nobody told may have the slot */
    *slot = (outfeed_slot){.route = route, .prompt = prompt, .live = kind};
    table->live += is_counted(slot);
    return 1;
}

int outfeed_rows_adopt(outfeed_table *table, uint64_t route, uint32_t prompt) {
    outfeed_slot *slot = slot_of(table, route);
    if (slot == NULL) return -1;
    if (slot->route != route) return outfeed_rows_open(table, route, prompt, OUTFEED_GENERATE);
    if (slot->live != OUTFEED_RECEIVED) return 0;
    slot->live = OUTFEED_GENERATE;
    table->live++;
    return 1;
}

int outfeed_rows_end(outfeed_table *table, uint64_t route) {
    outfeed_slot *slot = slot_of(table, route);
    if (slot == NULL) return -1;
    if (!has(slot, route)) return 0;
    table->live -= is_counted(slot);
    slot->live = 0;
    return 1;
}

void outfeed_rows_end_all(outfeed_table *table, const uint64_t *routes, uint32_t count) {
    for (uint32_t i = 0; i < count; i++) outfeed_rows_end(table, routes[i]);
}

int outfeed_rows_live(const outfeed_table *table, uint64_t route) {
    const outfeed_slot *slot = slot_of(table, route);
    if (slot == NULL) return -1;
    return has(slot, route) ? (int)slot->live : 0;
}

/* Take back what `advance` counted in for these rows. */
static void retract(outfeed_table *table, uint32_t rows, const void *routes, const void *counts) {
    for (uint32_t row = 0; row < rows; row++) {
        uint64_t route = route_at(routes, row);
        outfeed_slot *slot = slot_of(table, route);
        if (slot != NULL && has(slot, route)) slot->emitted -= count_at(counts, row);
    }
}

static int64_t refuse_row(outfeed_table *table, uint32_t row, const void *routes, const void *counts) {
    retract(table, row, routes, counts);
    return OUTFEED_ROUTE - (int64_t)row;
}

/* Count a step's tokens in: each row's `first` and prompt tokens. Returns how many there are, or OUTFEED_ROUTE - row,
 * and then nothing is counted. The statistics stay as they are. */
static int64_t advance(outfeed_table *table, const outfeed_decode_step *step, uint32_t *first, uint32_t *prompt,
                       uint32_t *stale_rows) {
    uint64_t tokens = 0;
    *stale_rows = 0;
    for (uint32_t row = 0; row < step->rows; row++) {
        uint64_t route = route_at(step->routes, row);
        outfeed_slot *slot = place_of(table, route);
        if (slot == NULL) return refuse_row(table, row, step->routes, step->counts);
        uint32_t more = count_at(step->counts, row);
        tokens += more;
        if (slot->route == route && has_rows(slot)) {
            first[row] = slot->emitted;
            prompt[row] = slot->prompt;
            slot->emitted += more;
        } else if (slot->route == 0 || !is_route(route) || has(slot, route)) {
            return refuse_row(table, row, step->routes, step->counts);
        } else {
            first[row] = 0;
            prompt[row] = 0;
            (*stale_rows)++;
        }
    }
    return (int64_t)tokens;
}

static uint8_t *put_number(uint8_t *at, uint8_t kind, uint64_t value, int bytes) {
    *at++ = kind;
    for (int i = bytes - 1; i >= 0; i--) *at++ = (uint8_t)(value >> (8 * i));
    return at;
}

/* [version, stamp u64, rows u32, tokens u32, endings, nil: the step form, families, nil: no texts] */
static void put_header(uint8_t *at, const outfeed_decode_step *step) {
    *at++ = 0x98; /* an array of 8 */
    *at++ = BATCH_VERSION;
    at = put_number(at, 0xcf, step->stamp_ns, 8);
    at = put_number(at, 0xce, step->rows, 4);
    at = put_number(at, 0xce, step->tokens, 4);
    memcpy(at, step->endings, step->endings_len);
    at += step->endings_len;
    *at++ = 0xc0;
    memcpy(at, step->families, step->families_len);
    at[step->families_len] = 0xc0;
}

static uint32_t header_bytes(const outfeed_decode_step *step) {
    return HEADER_BYTES + step->endings_len + step->families_len;
}

static uint64_t padded_header(const outfeed_decode_step *step) {
    return batch_padded_header(header_bytes(step));
}

uint64_t outfeed_step_size(const outfeed_decode_step *step) {
    return BATCH_PREFIX + padded_header(step) + (uint64_t)step->rows * BATCH_ROW + (uint64_t)step->tokens * BATCH_ID +
           step->optional_len;
}

int64_t outfeed_step(outfeed_table *table, const outfeed_decode_step *step, uint8_t *out) {
    uint32_t rows = step->rows, header_len = header_bytes(step);
    uint64_t padded = padded_header(step), size = outfeed_step_size(step);
    uint8_t *column = out + BATCH_PREFIX + padded;
    uint32_t *first = (uint32_t *)(void *)(column + BATCH_FIRST * (size_t)rows);
    uint32_t *count_column = first + rows, *prompt = count_column + rows;
    uint32_t stale_rows;
    if (any_negative(step->ids, step->tokens)) return OUTFEED_IDS;
    int64_t summed = advance(table, step, first, prompt, &stale_rows);
    if (summed < 0) return summed;
    if (summed != (int64_t)step->tokens) {
        retract(table, rows, step->routes, step->counts);
        return OUTFEED_TOKENS;
    }
    put_header(out + BATCH_PREFIX, step);
    memset(out + BATCH_PREFIX + header_len, 0, padded - header_len);
    memcpy(column, step->routes, 8 * (size_t)rows);
    if (step->counts != NULL)
        memcpy(count_column, step->counts, 4 * (size_t)rows);
    else
        for (uint32_t row = 0; row < rows; row++) count_column[row] = 1;
    memcpy(prompt + rows, step->ids, 4 * (size_t)step->tokens);
    if (step->optional_len) memcpy(prompt + rows + step->tokens, step->optional, step->optional_len);
    batch_seal(out, size, header_len);
    table->steps++;
    table->rows += rows;
    table->tokens += step->tokens;
    table->stale_rows += stale_rows;
    return 0;
}

void outfeed_step_retract(outfeed_table *table, const outfeed_decode_step *step) {
    retract(table, step->rows, step->routes, step->counts);
    for (uint32_t row = 0; row < step->rows; row++) {
        uint64_t route = route_at(step->routes, row);
        const outfeed_slot *slot = slot_of(table, route);
        if (slot != NULL && !has(slot, route)) table->stale_rows--;
    }
    table->steps--;
    table->rows -= step->rows;
    table->tokens -= step->tokens;
}
