/* One row of a step: its tokens' text, stop strings, what is held back, the end. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* memmem */
#endif
#include "shard.h"

#include <stdlib.h>
#include <string.h>
#include "utf8.h"

/* Where a row's text begins, how far it was searched for stop strings, and where the one that was found lies. */
typedef struct {
    size_t start, scanned, begin, end;
} search;

/* Run the automaton over the text not searched yet. With `detect`, stop at the first stop string to be complete (of
 * several that end there the longest): true, and [begin, end) is where it lies. */
static bool scan(struct ofs_shard *shard, slot *s, search *look, bool detect, uint32_t *pattern)
{
    slot_extra *extra = s->extra;
    const stop_set *set = extra->stops;
    const uint8_t *at = shard->text.at;
    uint32_t node = extra->node;
    shard->totals.work += shard->text.len - look->scanned;
    for (size_t i = look->scanned; i < shard->text.len; i++) {
        node = stops_step(set, node, at[i]);
        if (detect && set->node[node].match != STOPS_NONE) {
            *pattern = set->node[node].match;
            look->end = i + 1;
            look->begin = look->end >= set->lens[*pattern] ? look->end - set->lens[*pattern] : 0;
            return true;
        }
    }
    extra->node = node;
    look->scanned = shard->text.len;
    return false;
}

bool row_hold(struct ofs_shard *shard, slot_extra *extra, size_t keep)
{
    if (extra->held_cap < keep) {
        uint8_t *held = realloc(extra->held, 2 * keep);
        if (!held) return false;
        extra->held = held;
        extra->held_cap = (uint32_t)(2 * keep);
    }
    shard->text.len -= keep;
    extra->held_len = (uint32_t)keep;
    if (keep) memcpy(extra->held, shard->text.at + shard->text.len, keep);
    return true;
}

uint32_t row_matched_tokens(const slot *s, const ofs_finish *finish, const ofs_finishes *how,
                            const uint8_t *ids, uint32_t count)
{
    if (!finish || finish->kind != OFS_END_TOKENS || (s->flags & OFS_NO_STOP_TRIM)) return 0;
    if ((uint64_t)finish->offset + finish->length > how->matched_len) return 0;
    uint32_t n = finish->length / 4;
    if (n > count) n = count;
    const uint8_t *matched = how->matched + finish->offset + finish->length / 4 * 4 - 4 * (size_t)n;
    return memcmp(ids + 4 * (size_t)(count - n), matched, 4 * (size_t)n) ? 0 : n;
}

/* Whether a stop string may end the request with this many tokens of the row. */
static bool may_end(const slot *s, uint32_t tokens)
{
    return (uint64_t)s->expected + tokens >= s->extra->least;
}

/* Text of the row's tokens, one by one; true as soon as a stop string is complete, and the request may end. */
static bool row_tokens(struct ofs_shard *shard, slot *s, row_work *row, ready_view *ready, uint32_t *ends,
                       search *look, bool *ok)
{
    bool detect = (s->flags & OFS_DETECT) && s->extra && s->extra->stops;
    for (uint32_t k = 0; k < row->keep && *ok; k++) {
        int32_t id;
        memcpy(&id, row->ids + 4 * (size_t)k, 4);
        if (ready->lens) {
            *ok = text_ready(shard, s, ready->text + ready->at, ready->lens[k]);
            ready->at += ready->lens[k];
        } else if (!text_token_simply(shard, s, id)) {
            *ok = text_token(shard, s, id);
        }
        if (ends) ends[k] = (uint32_t)(shard->text.len - look->start);
        if (detect && scan(shard, s, look, may_end(s, k + 1), &row->stop)) {
            row->keep = row->count = k + 1;
            return true;
        }
    }
    if (!*ok || !row->finish) return false;
    *ok = ready->lens ? text_ready(shard, s, row->tail, row->tail_len) : text_flush(shard, s);
    return detect && scan(shard, s, look, may_end(s, row->keep), &row->stop);
}

bool row_simply(struct ofs_shard *shard, slot *s, const uint8_t *ids, uint32_t count)
{
    for (uint32_t k = 0; k < count; k++) {
        int32_t id;
        memcpy(&id, ids + 4 * (size_t)k, 4);
        if (!text_token_simply(shard, s, id) && !text_token(shard, s, id)) return false;
    }
    return true;
}

/* Cut the row's text where the stop string begins that the scheduler says it ended at. Both may be as long as a frame
 * allows: memmem's time is linear in them. */
static void trim_string(struct ofs_shard *shard, size_t start, const ofs_finish *f, const ofs_finishes *how)
{
    if (f->kind != OFS_END_STRING || (uint64_t)f->offset + f->length > how->matched_len) return;
    size_t made = shard->text.len - start;
    if (!f->length || !made) return;
    const uint8_t *hit = memmem(shard->text.at + start, made, how->matched + f->offset, f->length);
    if (hit) shard->text.len = (size_t)(hit - shard->text.at);
}

/* Leave out of the row's text what the client has already. */
static void skip_delivered(struct ofs_shard *shard, slot_extra *extra, size_t start)
{
    size_t made = shard->text.len - start;
    size_t skip = extra->skip < made ? (size_t)extra->skip : made;
    extra->skip -= skip;
    /* Whatever a RESTORE says: a row's text does not begin inside a character. */
    while (skip < made && utf8_inside(shard->text.at[start + skip])) skip++;
    memmove(shard->text.at + start, shard->text.at + start + skip, made - skip);
    shard->text.len -= skip;
}

bool row_decode(struct ofs_shard *shard, slot *s, row_work *row, ready_view *ready, const ofs_finishes *how,
                uint32_t *ends)
{
    search look = {.start = shard->text.len};
    size_t start = look.start;
    slot_extra *extra = s->extra;
    if (extra && extra->held_len) {
        if (!text_room(shard, extra->held_len)) return false;
        memcpy(shard->text.at + start, extra->held, extra->held_len);
        shard->text.len += extra->held_len;
        extra->held_len = 0;
    }
    look.scanned = shard->text.len;
    bool ok = true;
    if (row_tokens(shard, s, row, ready, ends, &look, &ok)) {
        size_t cut = (s->flags & OFS_NO_STOP_TRIM) ? look.end : look.begin;
        shard->text.len = cut > start ? cut : start;
        s->state |= SLOT_ENDED;
    } else if (!ok) {
        return false;
    } else if (row->finish) {
        s->state |= SLOT_ENDED;
        if (!(s->flags & OFS_NO_STOP_TRIM)) trim_string(shard, start, row->finish, how);
    } else if ((extra = s->extra) && extra->stops) {
        uint32_t pattern;
        scan(shard, s, &look, false, &pattern);
        size_t keep = extra->stops->node[extra->node].hold, made = shard->text.len - start;
        if (!row_hold(shard, extra, keep < made ? keep : made)) return false;
    }
    if ((extra = s->extra) && extra->skip) skip_delivered(shard, extra, start);
    return true;
}
