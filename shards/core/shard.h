/* The kernel's insides, shared by text.c (tokens to text), row.c (a row), kernel.c (a step) and requests.c. */
#ifndef OUTFEED_SHARD_H
#define OUTFEED_SHARD_H

#include "slots.h"
#include "table.h"

/* One call's text, all rows together. A frame cannot carry more; what would, fails its request alone. */
#define TEXT_MAX ((size_t)64 << 20)
#ifndef TEXT_FIRST
#define TEXT_FIRST 4096 /* room for text to begin with; tests have it grow from less */
#endif

typedef struct {
    uint8_t *at;
    size_t len, cap;
} text_buffer;

/* A row of a step, and where its ids begin. */
typedef struct {
    uint32_t row, at;
} row_place;

struct ofs_shard {
    bool has_table;
    table table;
    slot_table slots;
    text_buffer text;
    uint8_t *scratch, *frame;
    size_t scratch_cap, frame_cap;
    uint32_t *columns;                 /* the row columns that are u32, `row_cap` each */
    uint64_t *routes;
    uint32_t row_cap;
    int32_t *ids;
    uint32_t *token_ends;
    uint32_t token_cap, moves;
    ofs_failure *failures;
    ofs_stop *stops;
    row_place *order;                  /* of joined steps (order.c), and what finds it */
    uint32_t *groups;
    uint32_t order_cap;
    uint64_t order_key;                /* odd, and nobody's to foresee */
    ofs_step out;
    ofs_totals totals;
};

/* Room for n more bytes of text. */
bool text_room(struct ofs_shard *shard, size_t n);

/* Most tokens: known, whole characters, short, of a request with nothing special about it. They need one copy;
 * false, and nothing has happened, for any other token. */
static inline bool text_token_simply(struct ofs_shard *shard, const slot *s, int32_t id)
{
    const table *t = &shard->table;
    text_buffer *text = &shard->text;
    uint8_t busy = (s->state & (SLOT_STARTED | SLOT_RUN | SLOT_BROKEN)) ^ SLOT_STARTED;
    if ((busy | s->tail_len | s->strip_left) || (uint32_t)id >= t->ids || text->cap - text->len < TABLE_INLINE)
        return false;
    const table_entry *entry = &t->entries[(uint32_t)id];
    uint8_t len = table_load8(&entry->len), flags = table_load8(&entry->flags);
    if (len > TABLE_INLINE || (flags & (OFS_CLEAN | OFS_BYTE | OFS_SPECIAL)) != OFS_CLEAN) return false;
    __builtin_memcpy(text->at + text->len, entry->bytes, TABLE_INLINE);
    text->len += len;
    shard->totals.work += len + 1u;
    return true;
}

/* Whether a token is no text for this request: unknown, or special and skipped. */
static inline bool text_skips(const slot *s, const table_token *token)
{
    return !token->flags || ((token->flags & OFS_SPECIAL) && (s->flags & OFS_SKIP_SPECIAL));
}

/* Append what a token, or a token's ready-made text, adds to its request's text; false: no room for it. */
bool text_token(struct ofs_shard *shard, slot *s, int32_t id);
bool text_ready(struct ofs_shard *shard, slot *s, const uint8_t *bytes, size_t n);

/* The request is over: what was held for want of more bytes becomes text. */
bool text_flush(struct ofs_shard *shard, slot *s);

/* The tokens so far were the prompt's: their text, all that was emitted, is none of the output's. */
bool text_begin_output(struct ofs_shard *shard, slot *s);

/* The caller's text, and how far it is used. `lens` NULL: the table makes the text. */
typedef struct {
    const uint8_t *text;
    size_t len, at;
    const uint32_t *lens;
} ready_view;

/* One row on its way through. */
typedef struct {
    const uint8_t *ids;
    uint32_t count, keep; /* ids of the row; ids to decode and pass on */
    const ofs_finish *finish;
    const uint8_t *tail;
    uint32_t tail_len; /* ready-made text: what the decoder still held at the end */
    uint32_t stop;     /* the stop string that was found, or STOPS_NONE */
} row_work;

/* How many trailing ids of an ending row are the matched stop tokens: of several, as many as lie in this row. */
uint32_t row_matched_tokens(const slot *s, const ofs_finish *finish, const ofs_finishes *how,
                            const uint8_t *ids, uint32_t count);

/* Decode one row, its text at the end of shard->text; false when there is no room for it. */
bool row_decode(struct ofs_shard *shard, slot *s, row_work *row, ready_view *ready, const ofs_finishes *how,
                uint32_t *ends);

/* The same for a row that does not end, of a request without stops or held text. */
bool row_simply(struct ofs_shard *shard, slot *s, const uint8_t *ids, uint32_t count);

/* Put aside the last `keep` bytes of the text for the request's next row. */
bool row_hold(struct ofs_shard *shard, slot_extra *extra, size_t keep);

/* Put in shard->order the rows of joined steps, each request's together and in their order; or a negative code. */
int order_rows(struct ofs_shard *shard, const ofs_rows *step);

/* Replace ill-formed UTF-8 in one token's bytes; returns the bytes written or OFS_TOO_MUCH. */
int64_t text_lossy(const uint8_t *bytes, size_t n, uint8_t *out, size_t room);

#endif
