/* The scheduler's row table beside a plain model of it, under sanitizers.
 *
 *   fuzz SEED RUNS
 *
 * Built from the very sources of sidecar/core. Routes are of the table or anything, columns lie at any address in
 * memory of just their size, counts may be anything. Every answer, every column of a body and every count is the
 * model's.
 */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../../ring/core/batch.h"
#include "api.h"

#define READERS 2u
#define SLOTS 8u
#define ROWS 24u
#define TOKENS 64u

static uint64_t state;

static uint32_t rnd(uint32_t below) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return below ? (uint32_t)(state >> 11) % below : (uint32_t)(state >> 11);
}

#define REQUIRE(what)                                                              \
    do {                                                                           \
        if (!(what)) {                                                             \
            fprintf(stderr, "line %d: %s (state %llu)\n", __LINE__, #what,         \
                    (unsigned long long)state);                                    \
            abort();                                                               \
        }                                                                          \
    } while (0)

/* The model: what each place had last. */
typedef struct {
    uint64_t route;
    uint32_t emitted, prompt, kind;
} place;

static place places[READERS * SLOTS];
static uint64_t steps, rows_pushed, tokens_pushed, stale_pushed;

static uint64_t make_route(void) {
    static const uint64_t liked[] = {0, 1, UINT64_MAX, UINT64_C(1) << 36, UINT64_C(1) << 63, UINT64_C(1) << 28};
    if (rnd(30) == 0) return liked[rnd(6)] | rnd(SLOTS + 1);
    return (uint64_t)(1 + rnd(3)) << 36 | (uint64_t)rnd(rnd(20) ? READERS : 256) << 28 | (uint64_t)rnd(3) << 20 |
           rnd(rnd(20) ? SLOTS : 1u << 20);
}

/* NULL: no route of this table. */
static place *place_of(uint64_t route) {
    uint32_t reader = (uint32_t)(route >> 28) & 255, slot = (uint32_t)route & ((1u << 20) - 1);
    return route >> 36 == 0 || reader >= READERS || slot >= SLOTS ? NULL : &places[reader * SLOTS + slot];
}

static uint32_t kind_of(uint64_t route) {
    place *p = place_of(route);
    return p != NULL && p->route == route ? p->kind : 0;
}

/* Memory of just this size that begins at no particular address; free it by free_column. */
static uint8_t *column(size_t bytes, uint32_t *shift) {
    *shift = rnd(8);
    return (uint8_t *)malloc(*shift + bytes) + *shift;
}

static void free_column(uint8_t *at, uint32_t shift) { free(at - shift); }

static void one_call(outfeed_table *table) {
    uint64_t route = make_route();
    place *p = place_of(route);
    uint32_t kind = 1 + rnd(3), prompt = rnd(0), was = kind_of(route);
    int said, expected = p == NULL ? -1 : 0;
    switch (rnd(4)) {
    case 0:
        said = outfeed_rows_open(table, route, prompt, kind);
        if (p != NULL && !was) {
            *p = (place){route, 0, prompt, kind};
            expected = 1;
        }
        break;
    case 1:
        said = outfeed_rows_adopt(table, route, prompt);
        if (p != NULL && p->route != route) *p = (place){route, 0, prompt, 0}, was = OUTFEED_RECEIVED;
        if (was == OUTFEED_RECEIVED) {
            p->kind = OUTFEED_GENERATE;
            expected = 1;
        }
        break;
    case 2:
        said = outfeed_rows_end(table, route);
        if (was) {
            p->kind = 0;
            expected = 1;
        }
        break;
    default:
        said = outfeed_rows_live(table, route);
        if (was) expected = (int)was;
    }
    REQUIRE(said == expected);
}

/* What the model says of a step: 0, or the code; `first` and `prompt` of each row, and the model moves on. */
static int64_t expect(const uint64_t *routes, const uint32_t *counts, uint32_t rows, uint32_t tokens, int negative,
                      uint32_t *first, uint32_t *prompt, uint32_t *stale) {
    place before[READERS * SLOTS];
    memcpy(before, places, sizeof places);
    uint64_t sum = 0;
    int64_t code = negative ? OUTFEED_IDS : 0;
    *stale = 0;
    for (uint32_t row = 0; row < rows && code == 0; row++) {
        place *p = place_of(routes[row]);
        uint32_t kind = kind_of(routes[row]);
        if (p == NULL || p->route == 0 || kind == OUTFEED_CONTROL) {
            code = OUTFEED_ROUTE - (int64_t)row;
            break;
        }
        first[row] = kind ? p->emitted : 0;
        prompt[row] = kind ? p->prompt : 0;
        sum += counts[row];
        if (kind) p->emitted += counts[row];
        else ++*stale;
    }
    if (code == 0 && sum != tokens) code = OUTFEED_TOKENS;
    if (code != 0) memcpy(places, before, sizeof places);
    return code;
}

static void check_table(const outfeed_table *table) {
    REQUIRE(table->steps == steps && table->rows == rows_pushed);
    REQUIRE(table->tokens == tokens_pushed && table->stale_rows == stale_pushed);
    uint64_t live = 0;
    for (uint32_t at = 0; at < READERS * SLOTS; at++) {
        const outfeed_slot *slot = &table->slots[at];
        REQUIRE(slot->route == places[at].route && slot->emitted == places[at].emitted);
        REQUIRE(slot->prompt == places[at].prompt && slot->live == places[at].kind);
        live += slot->live == OUTFEED_GENERATE || slot->live == OUTFEED_CONTROL;
    }
    REQUIRE(table->live == live);
}

static void check_body(const uint8_t *body, uint64_t size, const outfeed_decode_step *step, const uint64_t *routes,
                       const uint32_t *counts, const uint32_t *first, const uint32_t *prompt) {
    uint32_t rows = step->rows;
    batch_prefix prefix;
    memcpy(&prefix, body, sizeof prefix);
    REQUIRE(prefix.body_len == size && prefix.check == batch_check(body, size, prefix.header_len));
    const uint8_t *header = body + BATCH_PREFIX, *end = header + prefix.header_len;
    REQUIRE(header[0] == 0x98 && header[1] == BATCH_VERSION);
    const uint8_t *families = end - 1 - step->families_len, *endings = families - 1 - step->endings_len;
    REQUIRE(end[-1] == 0xc0 && families[-1] == 0xc0);
    REQUIRE(memcmp(families, step->families, step->families_len) == 0);
    REQUIRE(memcmp(endings, step->endings, step->endings_len) == 0);
    const uint8_t *at = header + batch_padded_header(prefix.header_len);
    for (; end < at; end++) REQUIRE(*end == 0);
    REQUIRE(memcmp(at, routes, 8 * rows) == 0);
    REQUIRE(memcmp(at + BATCH_FIRST * rows, first, 4 * rows) == 0);
    REQUIRE(memcmp(at + BATCH_COUNTS * rows, counts, 4 * rows) == 0);
    REQUIRE(memcmp(at + BATCH_PROMPTS * rows, prompt, 4 * rows) == 0);
    REQUIRE(step->tokens == 0 || memcmp(at + BATCH_ROW * rows, step->ids, 4 * step->tokens) == 0);
    at += BATCH_ROW * rows + BATCH_ID * step->tokens;
    REQUIRE(step->optional_len == 0 || memcmp(at, step->optional, step->optional_len) == 0);
    REQUIRE(at + step->optional_len == body + size);
}

static void one_step(outfeed_table *table) {
    uint64_t routes[ROWS];
    uint32_t counts[ROWS], first[ROWS], prompt[ROWS], rows = 1 + rnd(ROWS), tokens = 0, stale;
    int each = rnd(3) == 0, negative = 0;
    for (uint32_t row = 0; row < rows; row++) {
        do routes[row] = make_route();
        while (rnd(50) && (place_of(routes[row]) == NULL || (kind_of(routes[row]) & OUTFEED_GENERATE) == 0));
        counts[row] = each ? 1 : tokens < TOKENS - 5 ? rnd(5) : 0;
        tokens += counts[row];
    }
    if (!each && rnd(20) == 0) counts[rnd(rows)] = rnd(0);
    if (rnd(20) == 0) tokens = rnd(TOKENS);
    uint32_t shifts[3], endings_len = 1 + rnd(40), families_len = 1 + rnd(40), optional_len = rnd(2) ? 4 * rnd(20) : 0;
    uint8_t *route_column = column(8 * rows, &shifts[0]), *count_column = column(4 * rows, &shifts[1]);
    uint8_t *ids = column(4 * tokens, &shifts[2]), *endings = malloc(endings_len);
    memcpy(route_column, routes, 8 * rows);
    memcpy(count_column, counts, 4 * rows);
    for (uint32_t i = 0; i < tokens; i++) {
        int32_t id = (int32_t)(rnd(0) >> 1);
        if (rnd(500) == 0) id = -id - 1, negative = 1;
        memcpy(ids + 4 * i, &id, 4);
    }
    memset(endings, 0x90, endings_len);
    uint8_t *families = malloc(families_len), *optional = optional_len ? malloc(optional_len) : NULL;
    memset(families, 0x91, families_len);
    if (optional) memset(optional, 0x92, optional_len);
    outfeed_decode_step step = {
        .stamp_ns = rnd(0), .routes = route_column, .counts = each ? NULL : count_column, .ids = ids,
        .endings = endings, .endings_len = endings_len, .families = families, .families_len = families_len,
        .optional = optional, .optional_len = optional_len, .rows = rows, .tokens = tokens,
    };
    int64_t code = expect(routes, counts, rows, tokens, negative, first, prompt, &stale);
    uint64_t size = outfeed_step_size(&step);
    uint8_t *body = malloc(size);
    REQUIRE(outfeed_step(table, &step, body) == code);
    if (code == 0) {
        check_body(body, size, &step, routes, counts, first, prompt);
        steps++, rows_pushed += rows, tokens_pushed += tokens, stale_pushed += stale;
        check_table(table);
        if (rnd(4) == 0) { /* it could not be published, and is pushed again */
            outfeed_step_retract(table, &step);
            REQUIRE(outfeed_step(table, &step, body) == 0);
            check_body(body, size, &step, routes, counts, first, prompt);
        }
    }
    check_table(table);
    free(body);
    free(endings);
    free(families);
    free(optional);
    free_column(ids, shifts[2]);
    free_column(count_column, shifts[1]);
    free_column(route_column, shifts[0]);
}

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    uint64_t seed = strtoull(argv[1], NULL, 10);
    long runs = strtol(argv[2], NULL, 10);
    for (long run = 0; run < runs; run++) {
        state = (seed * 1000003u + (uint64_t)run + 1) * UINT64_C(0x9E3779B97F4A7C15);
        outfeed_table table = {.slots = calloc(READERS * SLOTS, sizeof(outfeed_slot)), .readers = READERS, .slots_each = SLOTS};
        memset(places, 0, sizeof places);
        steps = rows_pushed = tokens_pushed = stale_pushed = 0;
        for (int n = 0; n < 100; n++) {
            for (uint32_t calls = rnd(20); calls; calls--) one_call(&table);
            if (n > 0) one_step(&table);
        }
        check_table(&table);
        free(table.slots);
    }
    printf("runs %ld\n", runs);
    return 0;
}
