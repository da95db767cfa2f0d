/* The kernel against anything: damaged tables, random registrations, rows, finishes and restores, under sanitizers.
 *
 *   fuzz SEED RUNS
 *
 * Built from the very sources of shards/core. What it checks beyond memory: text is UTF-8 and ends where it says,
 * row counts add up, a body that is packed has the length it says, and of a request at most 3 bytes of an
 * incomplete character, and 256 of a run of byte tokens, wait. Built with -DTORN (tests/torn.h) tables also change
 * between any two looks at a number in them; built with -DSCARCE (tests/scarce.h) memory runs out now and then.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "table.h"
#include "utf8.h"

#ifdef TORN
#include "torn.h"
#endif
#ifdef SCARCE
#include "scarce.h"
#else
static uint32_t scarce;
#endif

#define IDS 400u
#define SLOTS 24u
#define ROWS 40u
#define TOKENS 200u

static uint64_t state;

static uint32_t rnd(uint32_t below)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return below ? (uint32_t)(state >> 11) % below : 0;
}

#define REQUIRE(what)                                                              \
    do {                                                                           \
        if (!(what)) {                                                             \
            fprintf(stderr, "line %d: %s (state %llu)\n", __LINE__, #what,         \
                    (unsigned long long)state);                                    \
            abort();                                                               \
        }                                                                          \
    } while (0)

/* Text of any script, cut anywhere: pieces of these are the tokens. */
static const char *const TEXTS[] = {"a", "stop", "\xE2\x82\xAC", "\xF0\x9F\x98\x80", "\xED\xA0\x80", "\xC3", "\xA9",
                                    " ", "\xE2\x96\x81", "the", "\xFF", "aab", "", "0123456789abcdefghij"};
#define TEXT_COUNT (sizeof TEXTS / sizeof *TEXTS)

static bool whole(const uint8_t *p, size_t n)
{
    unsigned unit;
    for (size_t i = 0; i < n; i += unit)
        if (utf8_unit(p + i, n - i, &unit) != UTF8_VALID) return false;
    return true;
}

/* A table of such tokens; sometimes byte tokens, first forms and a strip. Returned in memory of just its size. */
static uint8_t *make_table(size_t *size)
{
    bool fallback = rnd(2), firsts = rnd(3) == 0, strip = rnd(3) == 0, wide = rnd(2);
    uint8_t blob[4096];
    table_header header = {.version = TABLE_VERSION, .ids = IDS, .firsts = firsts ? IDS : 0,
                           .strip_count = strip ? 1 + rnd(3) : 0, .strip_len = wide ? 3 : 1};
    memcpy(header.magic, TABLE_MAGIC, 8);
    memcpy(header.strip_char, wide ? "\xE2\x96\x81" : " ", header.strip_len);
    size_t count = IDS * (firsts ? 2u : 1u);
    table_entry *entries = calloc(count, sizeof *entries);
    for (size_t i = 0; i < count; i++) {
        table_entry *entry = &entries[i];
        size_t id = i % IDS;
        if (fallback && id < 256) {
            *entry = (table_entry){.len = 1, .flags = OFS_KNOWN | OFS_BYTE, .bytes = {(uint8_t)id}};
            continue;
        }
        if (rnd(20) == 0) continue; /* a hole */
        uint8_t flags = OFS_KNOWN | (rnd(10) == 0 ? OFS_SPECIAL : 0);
        char text[64] = "";
        for (uint32_t pieces = rnd(4); pieces; pieces--) strcat(text, TEXTS[rnd(TEXT_COUNT)]);
        size_t len = strlen(text);
        if (whole((uint8_t *)text, len)) flags |= OFS_CLEAN;
        else if (fallback) continue;
        entry->flags = flags;
        if (len <= TABLE_INLINE) {
            entry->len = (uint8_t)len;
            memcpy(entry->bytes, text, len);
        } else if (header.blob_len + len <= sizeof blob) {
            uint32_t span[2] = {(uint32_t)header.blob_len, (uint32_t)len};
            entry->len = TABLE_LONG;
            memcpy(entry->bytes + 2, span, sizeof span);
            memcpy(blob + header.blob_len, text, len);
            header.blob_len += len;
        } else {
            *entry = (table_entry){0};
        }
    }
    *size = sizeof header + count * sizeof *entries + header.blob_len;
    uint8_t *table = malloc(*size);
    memcpy(table, &header, sizeof header);
    memcpy(table + sizeof header, entries, count * sizeof *entries);
    memcpy(table + sizeof header + count * sizeof *entries, blob, header.blob_len);
    free(entries);
    return table;
}

static uint64_t make_route(void)
{
    return (uint64_t)(1 + rnd(2)) << 36 | (uint64_t)rnd(2) << 28 | (uint64_t)rnd(2) << 20 | rnd(SLOTS) * 97u;
}

static int32_t make_id(void) { return rnd(12) ? (int32_t)rnd(IDS + 4) - 2 : (int32_t)rnd(UINT32_MAX); }

static void do_register(ofs_shard *shard)
{
    uint8_t stops[256];
    uint32_t lens[8], count = rnd(3) ? 0 : 1 + rnd(7), at = 0;
    for (uint32_t i = 0; i < count; i++) {
        lens[i] = 0;
        for (uint32_t pieces = rnd(3); pieces; pieces--) {
            const char *piece = TEXTS[rnd(TEXT_COUNT)];
            size_t len = strlen(piece);
            /* Stops are made from text; a lone surrogate (ED A0 80) can be among them and matches nothing. */
            if (!whole((const uint8_t *)piece, len) && piece[0] != '\xED') continue;
            if (at + len > sizeof stops) break;
            memcpy(stops + at, piece, len);
            at += (uint32_t)len;
            lens[i] += (uint32_t)len;
        }
    }
    int32_t prompt[16];
    uint32_t prompt_len = rnd(17);
    for (uint32_t i = 0; i < prompt_len; i++) prompt[i] = make_id();
    uint64_t route = make_route();
    ofs_look look;
    int code = ofs_register(shard, route, rnd(8), stops, lens, count, rnd(9), prompt, prompt_len,
                            prompt_len + (rnd(3) == 0));
    REQUIRE(ofs_peek(shard, route, &look) == (code == OFS_OK || code == OFS_TAKEN));
}

static void do_restore(ofs_shard *shard)
{
    int32_t ids[64];
    uint32_t count = rnd(65);
    for (uint32_t i = 0; i < count; i++) ids[i] = make_id();
    uint32_t made;
    ofs_restore(shard, make_route(), ids, count, rnd(2) ? rnd(200) : UINT64_MAX >> rnd(64), NULL, rnd(count + 2), &made);
}

typedef struct {
    uint64_t routes[ROWS];
    uint32_t first[ROWS], counts[ROWS], prompt[ROWS];
    int32_t ids[TOKENS];
    ofs_finish finishes[ROWS];
    uint8_t matched[ROWS * 16];
} columns;

static void check_result(ofs_shard *shard, bool damaged)
{
    const ofs_step *out = ofs_result(shard);
    uint64_t text = 0, tokens = 0;
    for (uint32_t row = 0; row < out->rows; row++) {
        REQUIRE(damaged || whole(out->text + text, out->text_lens[row]));
        text += out->text_lens[row];
        tokens += out->counts[row];
        REQUIRE(out->counts[row] <= out->generated[row]);
        ofs_look look;
        REQUIRE(ofs_peek(shard, out->routes[row], &look));
        REQUIRE(look.tail <= 3 && look.run <= 256 && (look.run == 0 || look.tail <= look.run));
        REQUIRE(look.ended || look.expected >= out->first[row] + out->generated[row]);
    }
    REQUIRE(text == out->text_bytes && tokens == out->tokens);
    const uint8_t *body;
    uint8_t header[9] = {0};
    uint32_t header_len = rnd(10);
    int64_t size = ofs_pack(shard, header, header_len, &body);
    uint32_t lengths[2];
    if (scarce && size == OFS_NO_MEMORY) return;
    REQUIRE(size > 0);
    memcpy(lengths, body, 8);
    REQUIRE(lengths[0] == header_len && lengths[1] == (uint64_t)size && size % 4 == 0);
}

static void do_step(ofs_shard *shard, bool damaged)
{
    uint32_t scarcity = scarce;
    scarce = 0;
    columns *c = malloc(sizeof *c);
    uint32_t rows = rnd(ROWS + 1), tokens = 0, finishes = 0;
    for (uint32_t row = 0; row < rows; row++) {
        ofs_look look = {0};
        c->routes[row] = make_route();
        bool known = ofs_peek(shard, c->routes[row], &look);
        c->first[row] = known && rnd(10) ? look.expected : rnd(5);
        c->counts[row] = tokens < TOKENS - 5 ? rnd(5) : 0;
        c->prompt[row] = rnd(UINT32_MAX);
        for (uint32_t k = 0; k < c->counts[row]; k++) c->ids[tokens++] = make_id();
        if (rnd(4) == 0) {
            ofs_finish *f = &c->finishes[finishes];
            *f = (ofs_finish){row, 1 + rnd(3), 16 * finishes, rnd(17)};
            if (f->kind == 3 && tokens >= 4) memcpy(c->matched + f->offset, &c->ids[tokens - 4], 16);
            else memcpy(c->matched + f->offset, rnd(2) ? "stopaab\0\xE2\x82\xACxxxx" : "\xE2\x82\xAC aaaaaaaaaaa", 16);
            if (rnd(30) == 0) f->offset = rnd(UINT32_MAX);
            if (rnd(30) == 0) f->length = rnd(UINT32_MAX);
            finishes++;
        }
    }
    int32_t *ids = malloc(tokens ? 4 * (size_t)tokens : 1); /* of just their size, as the routes and all between are not */
    memcpy(ids, c->ids, 4 * (size_t)tokens);
    scarce = scarcity;
    ofs_rows step = {c->routes, c->first, c->counts, c->prompt, ids, rows, tokens};
    if (rows && rnd(50) == 0) c->counts[rnd(rows)] = rnd(UINT32_MAX);
    ofs_finishes how = {c->finishes, finishes, c->matched, (size_t)finishes * 16};
    uint32_t keep[ROWS];
    uint32_t reader = rnd(2);
    int planned = ofs_plan(shard, &step, 1, reader, rnd(2) ? &how : NULL, keep);
    /* As several steps joined, or as one; then a request may have rows all over it all the same. */
    uint32_t merge = rnd(2) ? 1 + rnd(rnd(2) ? 32 : 4096) : 0;
    int code = ofs_decode(shard, &step, 1, reader, rnd(8) ? &how : NULL, NULL, merge ? 0 : rnd(2), merge);
    bool without_memory = scarce && (planned == OFS_NO_MEMORY || code == OFS_NO_MEMORY);
    REQUIRE(without_memory || (planned == OFS_OK) == (code == OFS_OK));
    if (code == OFS_OK) check_result(shard, damaged);
    free(ids);
    free(c);
}

/* Whole sequences, in whatever state the table is: what they take is given back. */
static void do_each(ofs_shard *shard, bool damaged)
{
    int32_t ids[64];
    uint32_t counts[8], lens[8], count = rnd(9);
    uint64_t text = 0;
    for (uint32_t i = 0; i < 64; i++) ids[i] = make_id();
    for (uint32_t i = 0; i < count; i++) counts[i] = rnd(9);
    if (ofs_decode_each(shard, ids, counts, count, rnd(8), lens) != OFS_OK) return;
    for (uint32_t i = 0; i < count; i++) text += lens[i];
    REQUIRE(text == ofs_result(shard)->text_bytes);
    REQUIRE(damaged || whole(ofs_result(shard)->text, text));
}

static void one_run(void)
{
    size_t size;
    uint8_t *table = make_table(&size);
    bool damaged = rnd(2);
    for (uint32_t n = damaged ? 1 + rnd(6) : 0; n; n--)
        table[rnd(2) ? rnd(TABLE_HEADER) : rnd((uint32_t)size)] = (uint8_t)rnd(256);
    if (damaged && rnd(8) == 0) {
        size = rnd(rnd(2) ? TABLE_HEADER + 1 : (uint32_t)size + 1);
        table = realloc(table, size ? size : 1);
    }
#ifdef TORN
    damaged = true;
    torn_begin(table, size, state);
#endif
#ifdef SCARCE
    scarce = rnd(40);
#endif
    int error;
    ofs_shard *shard = ofs_new(table, size, &error);
    for (uint32_t n = shard ? 150 : 0; n; n--) {
        uint32_t what = rnd(20);
        if (what < 5) do_register(shard);
        else if (what < 6) do_restore(shard);
        else if (what < 7) ofs_forget(shard, make_route());
        else if (what < 8) ofs_end(shard, make_route());
        else if (what < 9) do_each(shard, damaged);
        else do_step(shard, damaged);
        uint8_t text[64];
        int64_t len = ofs_token_text(shard, make_id(), text, rnd(65));
        REQUIRE(len <= 64);
    }
    if (shard) {
        for (uint64_t reader = 0; reader < 2; reader++)
            for (uint64_t slot = 0; slot < SLOTS; slot++)
                for (uint64_t bits = 0; bits < 4; bits++)
                    ofs_forget(shard, (1 + bits / 2) << 36 | reader << 28 | (bits % 2) << 20 | slot * 97);
        REQUIRE(ofs_total(shard).live == 0 && ofs_total(shard).pages == 0);
    }
    ofs_free(shard);
    scarce = 0;
#ifdef TORN
    torn_begin(NULL, 0, 0);
#endif
    free(table);
}

int main(int argc, char **argv)
{
    if (argc != 3) return 2;
    uint64_t seed = strtoull(argv[1], NULL, 10);
    long runs = strtol(argv[2], NULL, 10);
    for (long run = 0; run < runs; run++) {
        state = (seed * 1000003u + (uint64_t)run + 1) * UINT64_C(0x9E3779B97F4A7C15);
        one_run();
    }
    printf("runs %ld\n", runs);
    return 0;
}
