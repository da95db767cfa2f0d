/* A decode step: rows in, text out, in one pass over the rows. */
#include "shard.h"

#include <stdlib.h>
#include <string.h>
#include "../../ring/core/batch.h"

enum { COLUMN_FIRST, COLUMN_COUNTS, COLUMN_PROMPT, COLUMN_GENERATED, COLUMN_TEXT, COLUMN_SOURCE, COLUMNS };

static uint32_t u32_at(const void *column, uint32_t row)
{
    uint32_t value;
    memcpy(&value, (const uint8_t *)column + 4 * (size_t)row, 4);
    return value;
}

static uint64_t u64_at(const void *column, uint32_t row)
{
    uint64_t value;
    memcpy(&value, (const uint8_t *)column + 8 * (size_t)row, 8);
    return value;
}

static const uint8_t *ids_at(const ofs_rows *step, uint32_t token)
{
    return (const uint8_t *)step->ids + 4 * (size_t)token;
}

/* The row's finish, if it has one; finishes are in row order. */
static const ofs_finish *finish_of(const ofs_finishes *how, uint32_t row)
{
    uint32_t low = 0, high = how ? how->count : 0;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (how->finishes[middle].row == row) return &how->finishes[middle];
        if (how->finishes[middle].row < row) low = middle + 1;
        else high = middle;
    }
    return NULL;
}

enum row_kind { ROW_NEXT, ROW_DOUBLED, ROW_LOST };

/* What a row of a live request is that has had `expected` tokens: the next one, one that it has had, or neither. */
static enum row_kind row_kind_of(uint32_t expected, uint32_t first, uint32_t count)
{
    if (first < expected && (uint64_t)first + count <= expected) return ROW_DOUBLED;
    return first == expected && count <= UINT32_MAX - first ? ROW_NEXT : ROW_LOST;
}

int ofs_columns(ofs_rows *step, const uint8_t *raw, size_t size, size_t at, size_t rows, size_t tokens)
{
    if (at > size || rows > (size - at) / BATCH_ROW || tokens > (size - at - BATCH_ROW * rows) / BATCH_ID) return OFS_BAD_ROW;
    if (rows > UINT32_MAX || tokens > UINT32_MAX) return OFS_BAD_ROW;
    const uint8_t *core = raw + at;
    step->routes = (const void *)core;
    step->first = (const void *)(core + BATCH_FIRST * rows);
    step->counts = (const void *)(core + BATCH_COUNTS * rows);
    step->prompt_tokens = (const void *)(core + BATCH_PROMPTS * rows);
    step->ids = (const void *)(core + BATCH_ROW * rows);
    step->rows = (uint32_t)rows;
    step->tokens = (uint32_t)tokens;
    return OFS_OK;
}

int ofs_plan(ofs_shard *shard, const ofs_rows *step, uint32_t number, uint32_t reader,
             const ofs_finishes *finishes, uint32_t *keep)
{
    /* Each request's rows in their order, as ofs_decode will meet them: a row moves what the next must follow. */
    int code = order_rows(shard, step);
    if (code != OFS_OK) return code;
    const slot *s = NULL;
    uint64_t last = 0;
    uint32_t expected = 0;
    bool live = false;
    for (uint32_t n = 0; n < step->rows; n++) {
        row_place at = shard->order[n];
        uint64_t route = u64_at(step->routes, at.row);
        uint32_t first = u32_at(step->first, at.row), count = u32_at(step->counts, at.row);
        if (n == 0 || route != last) {
            bool ours = route_shard(route) == number && route_reader(route) == reader;
            s = ours ? slots_find(&shard->slots, route) : NULL;
            live = s && !(s->state & SLOT_ENDED);
            expected = s ? s->expected : 0;
            last = route;
        }
        keep[at.row] = OFS_DROPPED;
        enum row_kind kind = row_kind_of(expected, first, count);
        if (live && kind == ROW_NEXT) {
            const ofs_finish *finish = finish_of(finishes, at.row);
            keep[at.row] = count - row_matched_tokens(s, finish, finishes, ids_at(step, at.at), count);
            expected += count;
            live = !finish;
        }
        if (kind == ROW_LOST) live = false;
    }
    return OFS_OK;
}

static bool room_for_rows(struct ofs_shard *shard, uint32_t rows, uint32_t tokens)
{
    if (shard->row_cap < rows || !shard->columns) {
        uint32_t cap = rows + rows / 2 + 16;
        shard->moves++;
        uint32_t *columns = realloc(shard->columns, sizeof(uint32_t) * COLUMNS * (size_t)cap);
        if (columns) shard->columns = columns;
        uint64_t *routes = realloc(shard->routes, sizeof(uint64_t) * (size_t)cap);
        if (routes) shard->routes = routes;
        ofs_failure *failures = realloc(shard->failures, sizeof(ofs_failure) * (size_t)cap);
        if (failures) shard->failures = failures;
        ofs_stop *stops = realloc(shard->stops, sizeof(ofs_stop) * (size_t)cap);
        if (stops) shard->stops = stops;
        if (!columns || !routes || !failures || !stops) return false; /* what grew has the old room, too */
        shard->row_cap = cap;
    }
    if (shard->token_cap < tokens || !shard->ids) {
        uint32_t cap = tokens + tokens / 2 + 16;
        shard->moves++;
        int32_t *ids = realloc(shard->ids, sizeof(int32_t) * (size_t)cap);
        if (ids) shard->ids = ids;
        uint32_t *ends = realloc(shard->token_ends, sizeof(uint32_t) * (size_t)cap);
        if (ends) shard->token_ends = ends;
        if (!ids || !ends) return false;
        shard->token_cap = cap;
    }
    return true;
}

static uint32_t *column(const struct ofs_shard *shard, int which)
{
    return shard->columns + (size_t)which * shard->row_cap;
}

static void out_begin(struct ofs_shard *shard)
{
    ofs_step *out = &shard->out;
    memset(out, 0, sizeof *out);
    shard->text.len = 0;
    out->routes = shard->routes;
    out->first = column(shard, COLUMN_FIRST);
    out->counts = column(shard, COLUMN_COUNTS);
    out->prompt_tokens = column(shard, COLUMN_PROMPT);
    out->generated = column(shard, COLUMN_GENERATED);
    out->text_lens = column(shard, COLUMN_TEXT);
    out->source = column(shard, COLUMN_SOURCE);
    out->ids = shard->ids;
    out->row_cap = shard->row_cap;
    out->token_cap = shard->token_cap;
    out->moves = shard->moves;
    out->token_ends = shard->token_ends;
    out->failures = shard->failures;
    out->stops = shard->stops;
}

static void fail(struct ofs_shard *shard, slot *s, uint32_t first, uint32_t count, int code)
{
    shard->failures[shard->out.failure_count++] =
        (ofs_failure){.route = s->route, .expected = s->expected, .first = first, .count = count,
                      .code = (uint32_t)-code};
    s->state |= SLOT_ENDED;
}

static void out_other(ofs_step *out, uint32_t reader)
{
    out->other_readers = 1;
    out->others[reader / 64] |= UINT64_C(1) << (reader % 64);
}

/* Whether the last row out is the same request's, and with this one's ids and text within `most` bytes. */
static bool out_merges(const struct ofs_shard *shard, const row_work *row, uint64_t route, size_t text,
                       uint32_t most)
{
    uint32_t last = shard->out.rows - 1;
    if (!most || !shard->out.rows || shard->routes[last] != route) return false;
    uint64_t ids = (uint64_t)column(shard, COLUMN_COUNTS)[last] + row->keep;
    return column(shard, COLUMN_TEXT)[last] + text + 4 * ids <= most;
}

static void out_row(struct ofs_shard *shard, const ofs_rows *step, uint32_t source, const row_work *row,
                    slot *s, size_t start, uint32_t merge)
{
    ofs_step *out = &shard->out;
    size_t text = shard->text.len - start;
    uint32_t n = out->rows;
    s->expected += row->count;
    shard->totals.tokens += row->count;
    if (out_merges(shard, row, s->route, text, merge)) {
        n--;
    } else {
        out->rows++;
        shard->routes[n] = s->route;
        column(shard, COLUMN_FIRST)[n] = u32_at(step->first, source);
        column(shard, COLUMN_PROMPT)[n] = u32_at(step->prompt_tokens, source);
        column(shard, COLUMN_COUNTS)[n] = column(shard, COLUMN_GENERATED)[n] = column(shard, COLUMN_TEXT)[n] = 0;
    }
    column(shard, COLUMN_COUNTS)[n] += row->keep;
    column(shard, COLUMN_GENERATED)[n] += row->count;
    column(shard, COLUMN_TEXT)[n] += (uint32_t)text;
    column(shard, COLUMN_SOURCE)[n] = source;
    memcpy(shard->ids + out->tokens, row->ids, 4 * (size_t)row->keep);
    out->tokens += row->keep;
    if (row->stop != STOPS_NONE) shard->stops[out->stop_count++] = (ofs_stop){n, row->stop};
}

/* What one call of ofs_decode was given, and the caller's text as far as it is used. */
typedef struct {
    const ofs_rows *step;
    const ofs_finishes *finishes;
    const uint32_t *lens; /* of the caller's text; NULL: the table makes the text */
    bool want_ends;
    uint32_t merge;
    ready_view ready;
} decoding;

/* Find the row's part of the caller's text, which covers what ofs_plan kept; its own tail stands behind all
 * tokens. False when it is not all there. */
static bool row_ready(decoding *d, const row_place *at, row_work *row, size_t *need)
{
    d->ready.lens = d->lens + at->at;
    for (uint32_t k = 0; k < row->keep; k++) *need += d->ready.lens[k];
    row->tail = d->ready.text + d->ready.at + *need;
    row->tail_len = d->lens[(size_t)d->step->tokens + at->row];
    *need += row->tail_len;
    return *need <= d->ready.len - d->ready.at;
}

/* One row of this shard: which request, is it the row that request waits for, then its text. */
static void step_row(struct ofs_shard *shard, decoding *d, const row_place *at, uint32_t count)
{
    const ofs_rows *step = d->step;
    const ofs_finish *finish = finish_of(d->finishes, at->row);
    uint64_t route = u64_at(step->routes, at->row);
    uint32_t first = u32_at(step->first, at->row);
    slot *s = slots_find(&shard->slots, route);
    if (!s) {
        shard->out.stale_rows++;
        return;
    }
    enum row_kind kind = row_kind_of(s->expected, first, count);
    if ((s->state & SLOT_ENDED) || kind == ROW_DOUBLED) {
        shard->out.doubled++;
        return;
    }
    if (kind == ROW_LOST) {
        fail(shard, s, first, count, OFS_BAD_ROW);
        return;
    }
    row_work row = {.ids = ids_at(step, at->at), .count = count, .finish = finish, .stop = STOPS_NONE};
    row.keep = count - row_matched_tokens(s, finish, d->finishes, row.ids, count);
    size_t need = 0;
    if (d->lens && !row_ready(d, at, &row, &need)) {
        fail(shard, s, first, count, OFS_TOO_MUCH);
        return;
    }
    size_t start = shard->text.len;
    uint32_t *ends = d->want_ends ? shard->token_ends + shard->out.tokens : NULL;
    bool simple = !finish && !d->lens && !ends && slot_plain(s);
    if (simple ? row_simply(shard, s, row.ids, count) : row_decode(shard, s, &row, &d->ready, d->finishes, ends)) {
        out_row(shard, step, at->row, &row, s, start, d->merge);
    } else {
        shard->text.len = start;
        fail(shard, s, first, count, OFS_TOO_MUCH);
    }
}

/* Where the next row's ready-made text begins. A row that was dropped has some, too, if an earlier row of its
 * request ended at a stop that the caller could not foresee. */
static size_t ready_after(const ofs_rows *step, const row_place *at, uint32_t count, const ofs_ready *ready,
                          size_t from)
{
    size_t need = ready->lens[(size_t)step->tokens + at->row];
    for (uint32_t k = 0; k < count; k++) need += ready->lens[at->at + k];
    return need < ready->len - from ? from + need : ready->len;
}

static void prefetch(const struct ofs_shard *shard, const ofs_rows *step, const row_place *at)
{
    if (at->row + 8 < step->rows) slots_prefetch(&shard->slots, u64_at(step->routes, at->row + 8));
    if (shard->has_table && at->at + 8 < step->tokens) {
        uint32_t ahead = u32_at(step->ids, at->at + 8);
        if (ahead < shard->table.ids) __builtin_prefetch(&shard->table.entries[ahead]);
    }
}

int ofs_decode(ofs_shard *shard, const ofs_rows *step, uint32_t number, uint32_t reader,
               const ofs_finishes *finishes, const ofs_ready *ready, int want_token_ends, uint32_t merge)
{
    decoding d = {.step = step, .finishes = finishes, .want_ends = want_token_ends, .merge = merge};
    row_place at = {0, 0};
    int code = OFS_OK;
    if (!shard->has_table && !ready) return OFS_BAD_TABLE;
    if (merge && (ready || want_token_ends)) return OFS_BAD_ROW;
    if (ready) {
        d.lens = ready->lens;
        d.ready = (ready_view){.text = ready->text, .len = ready->len};
    }
    if (!room_for_rows(shard, step->rows, step->tokens)) return OFS_NO_MEMORY;
    if (merge && (code = order_rows(shard, step)) != OFS_OK) return code;
    out_begin(shard);
    for (uint32_t n = 0; n < step->rows; n++) {
        if (merge) at = shard->order[n];
        uint64_t route = u64_at(step->routes, at.row);
        uint32_t count = u32_at(step->counts, at.row);
        if (count > step->tokens - at.at) return OFS_BAD_ROW;
        prefetch(shard, step, &at);
        size_t next = ready ? ready_after(step, &at, count, ready, d.ready.at) : 0;
        if (route_shard(route) == number) {
            if (route_reader(route) == reader)
                step_row(shard, &d, &at, count);
            else
                out_other(&shard->out, route_reader(route));
        }
        d.ready.at = next;
        at.at += count;
        at.row++;
    }
    shard->out.text = shard->text.at;
    shard->out.text_bytes = shard->text.len;
    shard->totals.text_bytes += shard->text.len;
    return OFS_OK;
}

/* ---- the result as a frame's body ---- */

static uint8_t *pack_column(uint8_t *at, const void *from, size_t bytes)
{
    if (bytes) memcpy(at, from, bytes);
    return at + bytes;
}

int64_t ofs_pack(ofs_shard *shard, const uint8_t *header, uint32_t header_len, const uint8_t **body)
{
    const ofs_step *out = &shard->out;
    size_t rows = out->rows, padded = batch_padded_header(header_len), text_pad = -out->text_bytes & 3u;
    size_t size = BATCH_PREFIX + padded + (BATCH_ROW + BATCH_EGRESS_ROW) * rows +
                  BATCH_ID * (size_t)out->tokens + out->text_bytes + text_pad;
    if (size > UINT32_MAX) return OFS_TOO_MUCH;
    if (shard->frame_cap < size) {
        uint8_t *frame = realloc(shard->frame, 2 * size);
        if (!frame) return OFS_NO_MEMORY;
        shard->frame = frame;
        shard->frame_cap = 2 * size;
    }
    uint8_t *at = pack_column(shard->frame + BATCH_PREFIX, header, header_len);
    memset(at, 0, padded - header_len);
    at = pack_column(shard->frame + BATCH_PREFIX + padded, out->routes, 8 * rows);
    at = pack_column(at, out->first, 4 * rows);
    at = pack_column(at, out->counts, 4 * rows);
    at = pack_column(at, out->prompt_tokens, 4 * rows);
    at = pack_column(at, out->ids, 4 * (size_t)out->tokens);
    at = pack_column(at, out->generated, 4 * rows);
    at = pack_column(at, out->text_lens, 4 * rows);
    at = pack_column(at, out->text, out->text_bytes);
    memset(at, 0, text_pad);
    batch_seal(shard->frame, size, header_len);
    *body = shard->frame;
    return (int64_t)size;
}
