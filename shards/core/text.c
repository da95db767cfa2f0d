#include "shard.h"

#include <stdlib.h>
#include <string.h>
#include "utf8.h"

bool text_room(struct ofs_shard *shard, size_t n)
{
    text_buffer *text = &shard->text;
    if (text->cap - text->len >= n) return true;
    if (n > TEXT_MAX || text->len + n > TEXT_MAX) return false;
    size_t cap = text->cap ? text->cap : TEXT_FIRST;
    while (cap < text->len + n) cap *= 2;
    uint8_t *at = realloc(text->at, cap);
    if (!at) return false;
    text->at = at;
    text->cap = cap;
    return true;
}

/* All text passes here: finished characters, minus the leading ones that the tokenizer's Strip takes. */
static bool emit(struct ofs_shard *shard, slot *s, const uint8_t *bytes, size_t n)
{
    const table *t = &shard->table;
    while (s->strip_left && n) {
        if (n < t->strip_len || memcmp(bytes, t->strip_char, t->strip_len)) {
            s->strip_left = 0;
        } else {
            s->strip_left--;
            bytes += t->strip_len;
            n -= t->strip_len;
        }
    }
    if (!text_room(shard, n + TABLE_INLINE)) return false; /* and for a token that needs no more than a copy */
    if (n) memcpy(shard->text.at + shard->text.len, bytes, n);
    shard->text.len += n;
    return true;
}

static bool emit_replacements(struct ofs_shard *shard, slot *s, uint32_t count)
{
    while (count--)
        if (!emit(shard, s, (const uint8_t *)UTF8_REPLACEMENT, UTF8_REPLACEMENT_LEN)) return false;
    return true;
}

/* A character that the prompt began and that is U+FFFD itself stands in the prompt's text already. */
static bool is_replacement(const uint8_t *bytes, size_t n)
{
    return n >= UTF8_REPLACEMENT_LEN && !memcmp(bytes, UTF8_REPLACEMENT, UTF8_REPLACEMENT_LEN);
}

/* Byte-level: the tail that waited, then these bytes; what is again an incomplete character waits. */
static bool feed_bytes(struct ofs_shard *shard, slot *s, const uint8_t *bytes, size_t n)
{
    size_t len = s->tail_len + n, valid = 0, i = 0;
    if (!len) return true;
    if (shard->scratch_cap < len) {
        uint8_t *scratch = realloc(shard->scratch, 2 * len);
        if (!scratch) return false;
        shard->scratch = scratch;
        shard->scratch_cap = 2 * len;
    }
    uint8_t *all = shard->scratch;
    memcpy(all, s->tail, s->tail_len);
    if (n) memcpy(all + s->tail_len, bytes, n);
    while (i < len) {
        unsigned unit;
        enum utf8_kind kind = utf8_unit(all + i, len - i, &unit);
        if (kind == UTF8_INCOMPLETE) break;
        if (kind == UTF8_INVALID) {
            if (!emit(shard, s, all + valid, i - valid)) return false;
            /* A character that the prompt began and nobody finished was replaced in the prompt's text. */
            bool prompts = i == 0 && (s->state & SLOT_PROMPT_TAIL);
            if (!prompts && !emit_replacements(shard, s, 1)) return false;
            valid = i + unit;
        }
        if (i == 0 && (s->state & SLOT_PROMPT_TAIL) && is_replacement(all, unit)) valid = unit;
        s->state &= (uint8_t)~SLOT_PROMPT_TAIL;
        i += unit;
    }
    if (!emit(shard, s, all + valid, i - valid)) return false;
    s->tail_len = (uint8_t)(len - i); /* at most 3: utf8_unit */
    memcpy(s->tail, all + i, len - i);
    return true;
}

/* The first `whole` bytes of a run are text. */
static bool run_emit(struct ofs_shard *shard, slot *s, uint32_t whole)
{
    slot_extra *extra = s->extra;
    uint32_t told = extra->run_prompt && is_replacement(extra->run, whole) ? UTF8_REPLACEMENT_LEN : 0;
    return emit(shard, s, extra->run + told, whole - told);
}

/* A byte token: the run it belongs to is text if all of it is UTF-8, else one U+FFFD per byte. `tail_len` counts
 * the bytes of the run's unfinished last character. */
static bool run_byte(struct ofs_shard *shard, slot *s, uint8_t byte)
{
    slot_extra *extra = slot_need_extra(s);
    unsigned unit;
    if (!extra) return false;
    if (s->state & SLOT_BROKEN) return emit_replacements(shard, s, 1);
    if (!(s->state & SLOT_RUN)) s->tail_len = 0; /* a damaged table's: left open by tokens that are no byte tokens */
    s->state |= SLOT_RUN;
    if (extra->run_len >= RUN_MAX) return false; /* cannot be: a full run is sent below */
    extra->run[extra->run_len++] = byte;
    uint32_t open = (uint32_t)s->tail_len + 1;
    switch (utf8_unit(extra->run + extra->run_len - open, open, &unit)) {
    case UTF8_VALID:
        s->tail_len = 0;
        break;
    case UTF8_INCOMPLETE:
        s->tail_len = (uint8_t)open;
        break;
    case UTF8_INVALID: {
        uint32_t count = extra->run_len - extra->run_prompt;
        extra->run_len = extra->run_prompt = 0;
        s->tail_len = 0;
        s->state = (uint8_t)((s->state & ~SLOT_RUN) | SLOT_BROKEN);
        return emit_replacements(shard, s, count);
    }
    }
    if (extra->run_len < RUN_MAX) return true;
    uint32_t whole = extra->run_len - s->tail_len;
    bool ok = run_emit(shard, s, whole);
    memmove(extra->run, extra->run + whole, s->tail_len);
    extra->run_len = s->tail_len;
    extra->run_prompt = 0;
    return ok;
}

static bool run_end(struct ofs_shard *shard, slot *s)
{
    slot_extra *extra = s->extra;
    bool ok = true;
    if (s->state & SLOT_RUN) {
        if (s->tail_len)
            ok = emit_replacements(shard, s, extra->run_len - extra->run_prompt);
        else
            ok = run_emit(shard, s, extra->run_len);
        extra->run_len = extra->run_prompt = 0;
        s->tail_len = 0;
    }
    s->state &= (uint8_t)~(SLOT_RUN | SLOT_BROKEN);
    return ok;
}

bool text_token(struct ofs_shard *shard, slot *s, int32_t id)
{
    const table *t = &shard->table;
    table_token token = table_get(t, id, !(s->state & SLOT_STARTED));
    if (text_skips(s, &token)) return true;
    shard->totals.work += token.len + 1u;
    if ((token.flags & OFS_BYTE) && token.len == 1) {
        s->state |= SLOT_STARTED;
        return run_byte(shard, s, token.bytes[0]);
    }
    if ((s->state & (SLOT_RUN | SLOT_BROKEN)) && !run_end(shard, s)) return false;
    s->state |= SLOT_STARTED;
    if (s->tail_len || !(token.flags & OFS_CLEAN)) return feed_bytes(shard, s, token.bytes, token.len);
    return emit(shard, s, token.bytes, token.len);
}

bool text_ready(struct ofs_shard *shard, slot *s, const uint8_t *bytes, size_t n)
{
    shard->totals.work += n + 1;
    return emit(shard, s, bytes, n);
}

bool text_flush(struct ofs_shard *shard, slot *s)
{
    if (s->state & (SLOT_RUN | SLOT_BROKEN)) return run_end(shard, s);
    bool replace = s->tail_len && !(s->state & SLOT_PROMPT_TAIL);
    s->tail_len = 0;
    return !replace || emit_replacements(shard, s, 1);
}

bool text_begin_output(struct ofs_shard *shard, slot *s)
{
    bool ok = true;
    if (s->state & SLOT_RUN) {
        /* Whole characters are the prompt's; the open one becomes output if output completes it. */
        slot_extra *extra = s->extra;
        ok = emit(shard, s, extra->run, extra->run_len - s->tail_len);
        if (s->tail_len) s->strip_left = 0; /* the prompt's text goes on, with U+FFFD */
        memmove(extra->run, extra->run + extra->run_len - s->tail_len, s->tail_len);
        extra->run_len = extra->run_prompt = s->tail_len;
    } else if (s->tail_len) {
        s->state |= SLOT_PROMPT_TAIL;
        s->strip_left = 0;
    }
    return ok;
}

int64_t text_lossy(const uint8_t *bytes, size_t n, uint8_t *out, size_t room)
{
    size_t done = 0;
    for (size_t i = 0; i < n;) {
        unsigned unit;
        bool valid = utf8_unit(bytes + i, n - i, &unit) == UTF8_VALID;
        size_t len = valid ? unit : UTF8_REPLACEMENT_LEN;
        if (room - done < len) return OFS_TOO_MUCH;
        memcpy(out + done, valid ? bytes + i : (const uint8_t *)UTF8_REPLACEMENT, len);
        done += len;
        i += unit;
    }
    return (int64_t)done;
}
