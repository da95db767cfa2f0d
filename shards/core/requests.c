/* A shard's life, and its requests': register, restore, forget, look. */
#include "shard.h"

#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include "utf8.h"

ofs_shard *ofs_new(const uint8_t *base, size_t table_len, int *error)
{
    ofs_shard *shard = calloc(1, sizeof *shard);
    *error = shard ? OFS_OK : OFS_NO_MEMORY;
    if (!shard) return NULL;
    if (base && !(shard->has_table = table_open(&shard->table, base, table_len))) {
        *error = OFS_BAD_TABLE;
        free(shard);
        return NULL;
    }
    /* Short of randomness (only ever at boot) it is merely a number that could be foreseen. */
    if (getrandom(&shard->order_key, sizeof shard->order_key, GRND_NONBLOCK) < 0)
        shard->order_key = UINT64_C(0x9E3779B97F4A7C15);
    shard->order_key |= 1;
    return shard;
}

void ofs_free(ofs_shard *shard)
{
    if (!shard) return;
    slots_free(&shard->slots);
    free(shard->text.at);
    free(shard->scratch);
    free(shard->frame);
    free(shard->columns);
    free(shard->routes);
    free(shard->ids);
    free(shard->token_ends);
    free(shard->failures);
    free(shard->stops);
    free(shard->order);
    free(shard->groups);
    free(shard);
}

const ofs_step *ofs_result(const ofs_shard *shard) { return &shard->out; }

ofs_totals ofs_total(const ofs_shard *shard)
{
    ofs_totals totals = shard->totals;
    totals.live = shard->slots.live;
    totals.pages = shard->slots.pages;
    return totals;
}

int ofs_peek(const ofs_shard *shard, uint64_t route, ofs_look *look)
{
    slot *s = slots_find(&shard->slots, route);
    if (!s) return 0;
    *look = (ofs_look){.route = s->route, .expected = s->expected, .tail = s->tail_len,
                       .run = s->extra ? s->extra->run_len : 0, .held = s->extra ? s->extra->held_len : 0,
                       .ended = !!(s->state & SLOT_ENDED)};
    return 1;
}

const uint8_t *ofs_held(const ofs_shard *shard, uint64_t route, uint32_t *len)
{
    slot *s = slots_find(&shard->slots, route);
    *len = s && s->extra ? s->extra->held_len : 0;
    return *len ? s->extra->held : NULL;
}

int ofs_forget(ofs_shard *shard, uint64_t route) { return slots_drop(&shard->slots, route); }

void ofs_end(ofs_shard *shard, uint64_t route)
{
    slot *s = slots_find(&shard->slots, route);
    if (s) s->state |= SLOT_ENDED;
}

/* Where text begins in the end of a longer prompt, which may begin inside a character. Of a run of byte tokens
 * the rest of that character would break all the others; it is the prompt's, so nobody misses it. */
static uint32_t prompt_start(const ofs_shard *shard, const slot *s, const int32_t *prompt, uint32_t prompt_len)
{
    uint32_t at = 0, inside = 0;
    for (; at < prompt_len && inside < UTF8_MOST_INSIDE; at++) {
        table_token token = table_get(&shard->table, prompt[at], false);
        if (text_skips(s, &token)) continue; /* no text ends no run */
        if (!(token.flags & OFS_BYTE) || token.len != 1 || !utf8_inside(token.bytes[0])) break;
        inside++;
    }
    return at;
}

int ofs_register(ofs_shard *shard, uint64_t route, uint32_t flags, const uint8_t *stops,
                 const uint32_t *stop_lens, uint32_t stop_count, uint32_t least, const int32_t *prompt,
                 uint32_t prompt_len, uint32_t prompt_tokens)
{
    uint64_t total = 0;
    if (!route) return OFS_BAD_ROW;
    for (uint32_t i = 0; i < stop_count; i++) total += stop_lens[i];
    if (stop_count > OFS_MAX_STOPS || total > OFS_MAX_STOP_BYTES) return OFS_TOO_MUCH;
    if (slots_find(&shard->slots, route)) return OFS_TAKEN;
    slot *s = slots_take(&shard->slots, route);
    if (!s) return OFS_NO_MEMORY;
    s->flags = (uint8_t)flags;
    if (total) {
        slot_extra *extra = slot_need_extra(s);
        if (!extra || !(extra->stops = stops_new(stops, stop_lens, stop_count))) {
            slots_drop(&shard->slots, route);
            return OFS_NO_MEMORY;
        }
        extra->least = least;
    }
    if (!shard->has_table) return OFS_OK;
    uint32_t start = 0;
    /* Of a longer prompt only the end is here: its beginning has begun the text. */
    if (prompt_tokens > prompt_len) {
        s->state |= SLOT_STARTED;
        start = prompt_start(shard, s, prompt, prompt_len);
    } else {
        s->strip_left = (uint8_t)shard->table.strip_count;
    }
    shard->text.len = 0;
    bool ok = true;
    for (uint32_t i = start; i < prompt_len && ok; i++) ok = text_token(shard, s, prompt[i]);
    ok = ok && text_begin_output(shard, s);
    shard->text.len = 0;
    if (ok) return OFS_OK;
    slots_drop(&shard->slots, route);
    return OFS_NO_MEMORY;
}

static uint32_t characters(const uint8_t *text, size_t n)
{
    uint32_t count = 0;
    for (size_t i = 0; i < n; i++) count += !utf8_inside(text[i]);
    return count;
}

int ofs_restore(ofs_shard *shard, uint64_t route, const int32_t *ids, uint32_t count, uint64_t text_bytes,
                const ofs_ready *ready, uint32_t part, uint32_t *made_by_part)
{
    slot *s = slots_find(&shard->slots, route);
    if (!s) return OFS_BAD_ROW;
    if (part > count) part = count;
    row_work begin = {.ids = (const uint8_t *)ids, .count = part, .keep = part, .stop = STOPS_NONE};
    uint32_t left = count - part;
    row_work row = {.ids = (const uint8_t *)(ids + part), .count = left, .keep = left, .stop = STOPS_NONE};
    ready_view text = {.at = 0};
    if (!shard->has_table && !ready) return OFS_BAD_TABLE;
    if (ready) text = (ready_view){.text = ready->text, .len = ready->len, .lens = ready->lens};
    size_t need = 0;
    for (uint32_t k = 0; ready && k < count; k++) need += ready->lens[k];
    if (need > text.len) return OFS_TOO_MUCH;
    uint8_t flags = s->flags;
    s->flags &= (uint8_t)~OFS_DETECT; /* what was delivered did not stop: only the automaton's state is wanted */
    shard->text.len = 0;
    bool ok = row_decode(shard, s, &begin, &text, NULL, NULL);
    *made_by_part = characters(shard->text.at, shard->text.len);
    if (s->extra) *made_by_part += characters(s->extra->held, s->extra->held_len);
    if (ready) text.lens += part;
    ok = ok && row_decode(shard, s, &row, &text, NULL, NULL);
    s->flags = flags;
    slot_extra *extra = ok ? slot_need_extra(s) : NULL;
    if (!extra) return OFS_NO_MEMORY;
    s->expected = count;
    size_t made = shard->text.len, sent = text_bytes < made ? (size_t)text_bytes : made;
    while (sent && sent < made && utf8_inside(shard->text.at[sent])) sent--;
    extra->skip = text_bytes > made ? text_bytes - made : 0;
    if (sent < made) {
        /* Owed: text that was made before but not delivered goes out with the next row, before what is held. */
        size_t held = extra->held_len;
        if (!text_room(shard, held)) return OFS_NO_MEMORY;
        if (held) memcpy(shard->text.at + made, extra->held, held);
        shard->text.len += held;
        if (!row_hold(shard, extra, shard->text.len - sent)) return OFS_NO_MEMORY;
    }
    shard->out.text = shard->text.at;
    shard->out.text_bytes = sent;
    shard->text.len = 0;
    return OFS_OK;
}

int ofs_decode_each(ofs_shard *shard, const int32_t *ids, const uint32_t *counts, uint32_t count, uint32_t flags,
                    uint32_t *lens)
{
    if (!shard->has_table) return OFS_BAD_TABLE;
    shard->text.len = 0;
    for (uint32_t i = 0; i < count; i++) {
        slot s = {.route = 1, .flags = (uint8_t)flags, .strip_left = (uint8_t)shard->table.strip_count};
        size_t start = shard->text.len;
        bool ok = true;
        for (uint32_t k = 0; k < counts[i] && ok; k++) ok = text_token(shard, &s, ids[k]);
        ok = ok && text_flush(shard, &s);
        free(s.extra); /* of a request without stops: only a run of bytes, in place */
        if (!ok) return OFS_TOO_MUCH;
        lens[i] = (uint32_t)(shard->text.len - start);
        ids += counts[i];
    }
    shard->out.text = shard->text.at;
    shard->out.text_bytes = shard->text.len;
    return OFS_OK;
}

int64_t ofs_token_text(const ofs_shard *shard, int32_t id, uint8_t *out, size_t room)
{
    if (!shard->has_table) return OFS_BAD_TABLE;
    table_token token = table_get(&shard->table, id, true);
    if (token.flags & OFS_BYTE && token.len == 1 && token.bytes[0] >= 0x80) return text_lossy(token.bytes, 1, out, room);
    uint32_t skip = 0;
    for (uint32_t n = 0; n < shard->table.strip_count && token.len - skip >= shard->table.strip_len; n++) {
        if (memcmp(token.bytes + skip, shard->table.strip_char, shard->table.strip_len)) break;
        skip += shard->table.strip_len;
    }
    return text_lossy(token.bytes + skip, token.len - skip, out, room);
}
