/* Reading a ring's lanes through one cursor. Everything loaded from the segment is loaded once, into a
 * local, checked, and only then used. A lane that fails a check is quarantined; the others go on. */

#include "reader.h"

#include <stdlib.h>
#include <string.h>

/* Remember a fault for reader_read to tell of, and close the lane to everyone. */
static void lane_fault(lane_reader *c, uint32_t lane, uint64_t position) {
    cursor *k = &c->lanes[lane];
    k->state = LANE_FAULTY;
    k->fault = position;
    c->faults++;
    quarantine(&c->ring, lane, position);
}

static void note_quarantine(lane_reader *c, uint32_t lane) {
    uint64_t q = peek(&lane_at(&c->ring, lane)->quarantine);
    if (q != 0) lane_fault(c, lane, q & ~UINT64_C(1));
}

static record load_record(const uint8_t *at) {
    union {
        uint64_t words[2];
        record record;
    } u;
    const word *from = (const word *)at;
    u.words[0] = peek(&from[0]);
    u.words[1] = peek(&from[1]);
    return u.record;
}

/* Bytes the record at `position` takes, 0 when it is not one that a writer can have written there. */
static uint64_t sane_record(const ring *r, const record *rec, uint64_t position, uint64_t tail) {
    uint64_t left = r->capacity - (position & (r->capacity - 1));
    uint64_t bytes = record_bytes(rec->body_len);
    if (rec->seq != position || rec->reserved != 0 || bytes > left || bytes > tail - position) return 0;
    /* The tag tells padding from a frame whose flags were overwritten, which would be passed over in silence. */
    if (rec->flags == RECORD_PAD) return bytes == left && (rec->body_len & 15) == 0 && rec->tag == 0 ? bytes : 0;
    return rec->flags == 0 && rec->body_len <= largest_body(r) ? bytes : 0;
}

/* Read up to `limit` frames of a lane, none that starts at or after `stop`; returns how many. */
static uint32_t read_lane(lane_reader *c, uint32_t lane, uint32_t limit, uint64_t stop, const frames *out,
                          uint32_t have) {
    cursor *k = &c->lanes[lane];
    const ring *r = &c->ring;
    uint64_t position = k->next, tail = load_tail(&lane_at(r, lane)->tail);
    uint32_t n = 0;
    if (tail == position) return 0;
    if (!sane_span(r, k->head, tail) || tail < position) {
        lane_fault(c, lane, tail);
        return 0;
    }
    raise_to(&head_at(r, c->index, lane)->high_water, tail - k->head);
    while (position < tail && position < stop && n < limit) {
        uint64_t at = place(r, lane, position);
        record rec = load_record(r->base + at);
        uint64_t bytes = sane_record(r, &rec, position, tail);
        if (bytes == 0) {
            lane_fault(c, lane, position);
            break;
        }
        position += bytes;
        if (rec.flags == RECORD_PAD) continue;
        out->lane[have + n] = lane;
        out->tag[have + n] = rec.tag;
        out->start[have + n] = at + RING_RECORD_HEADER;
        out->end[have + n] = at + RING_RECORD_HEADER + rec.body_len;
        c->body_bytes += rec.body_len;
        n++;
    }
    k->next = position;
    return n;
}

/* One round over the lanes from the turn's lane on, at most `share` frames from each. */
static uint32_t read_round(lane_reader *c, uint32_t share, uint32_t limit, const uint64_t *upto,
                           const frames *out, uint32_t have) {
    for (uint32_t i = 0; i < c->ring.lanes && have < limit; i++) {
        uint32_t lane = (c->turn + i) % c->ring.lanes;
        if (c->lanes[lane].state != LANE_GOOD) continue;
        uint32_t most = limit - have < share ? limit - have : share;
        have += read_lane(c, lane, most, upto ? upto[lane] : UINT64_MAX, out, have);
    }
    return have;
}

/* A fault not told yet: tell it, once. */
static int tell_fault(lane_reader *c) {
    for (uint32_t lane = 0; lane < c->ring.lanes; lane++) {
        cursor *k = &c->lanes[lane];
        if (k->state != LANE_FAULTY) continue;
        k->state = LANE_SKIPPED;
        c->faults--;
        c->telling = 1;
        c->told_lane = lane;
        c->told_position = k->fault;
        return RING_CORRUPT;
    }
    c->faults = 0;
    return RING_OK;
}

static int read_all(lane_reader *c, uint32_t limit, const uint64_t *upto, const frames *out) {
    if (limit < 1 || limit > RING_MAX_BATCH) return RING_ARGUMENT;
    c->telling = 0;
    for (uint32_t lane = 0; lane < c->ring.lanes; lane++) {
        c->lanes[lane].before = c->lanes[lane].next;
        if (c->lanes[lane].state == LANE_GOOD) note_quarantine(c, lane);
    }
    if (c->faults) return tell_fault(c);
    uint64_t bytes = c->body_bytes;
    /* First a fair share each, then whatever is left for whoever has more. */
    uint32_t share = (limit + c->ring.lanes - 1) / c->ring.lanes;
    uint32_t have = read_round(c, share, limit, upto, out, 0);
    if (c->ring.lanes > 1 && have < limit) have = read_round(c, limit, limit, upto, out, have);
    c->turn = (c->turn + 1) % c->ring.lanes;
    if (have) {
        bump(&c->shared->frames, have);
        bump(&c->shared->body_bytes, c->body_bytes - bytes);
        bump(&c->shared->batches, 1);
    } else if (c->faults) {
        return tell_fault(c);
    }
    return (int)have;
}

int reader_read(lane_reader *c, uint32_t limit, const uint64_t *upto, const frames *out) {
    int rc = guard_enter(&c->guard);
    if (rc != RING_OK) return rc;
    rc = read_all(c, limit, upto, out);
    guard_leave(&c->guard);
    return rc;
}

int reader_unread(lane_reader *c) {
    int rc = guard_enter(&c->guard);
    if (rc != RING_OK) return rc;
    for (uint32_t lane = 0; lane < c->ring.lanes; lane++) {
        cursor *k = &c->lanes[lane];
        if (k->before >= k->head) k->next = k->before; /* else it has been released meanwhile */
    }
    if (c->telling) {
        c->lanes[c->told_lane].state = LANE_FAULTY;
        c->faults++;
        c->telling = 0;
    }
    guard_leave(&c->guard);
    return RING_OK;
}

void reader_tell(lane_reader *c) {
    uint32_t moved = 0;
    if (load_state(&c->shared->state) != CURSOR_OPEN) store_state(&c->shared->state, CURSOR_OPEN);
    for (uint32_t lane = 0; lane < c->ring.lanes; lane++) {
        cursor *k = &c->lanes[lane];
        word *head = &head_at(&c->ring, c->index, lane)->head;
        k->moved = peek(head) != k->head;
        if (!k->moved) continue;
        store_head(head, k->head);
        moved++;
    }
    if (!moved) return;
    fence_released();
    for (uint32_t lane = 0; lane < c->ring.lanes; lane++) {
        lane_block *l = lane_at(&c->ring, lane);
        if (!c->lanes[lane].moved || !see_flag(&l->room_parked)) continue;
        if (c->lanes[lane].head >= peek(&l->room_wanted)) wake_writer(l);
    }
}

int reader_release(lane_reader *c) {
    int rc = guard_enter(&c->guard);
    if (rc != RING_OK) return rc;
    for (uint32_t lane = 0; lane < c->ring.lanes; lane++) c->lanes[lane].head = c->lanes[lane].next;
    reader_tell(c);
    guard_leave(&c->guard);
    return RING_OK;
}

int reader_tails(lane_reader *c, uint64_t *out) {
    int rc = guard_enter(&c->guard);
    if (rc != RING_OK) return rc;
    for (uint32_t lane = 0; lane < c->ring.lanes; lane++) out[lane] = load_tail(&lane_at(&c->ring, lane)->tail);
    guard_leave(&c->guard);
    return RING_OK;
}

int reader_has_more(lane_reader *c) {
    if (c->faults) return 1;
    for (uint32_t lane = 0; lane < c->ring.lanes; lane++) {
        if (c->lanes[lane].state != LANE_GOOD) continue;
        lane_block *l = lane_at(&c->ring, lane);
        if (load_tail(&l->tail) != c->lanes[lane].next || peek(&l->quarantine) != 0) return 1;
    }
    return 0;
}

int reader_pending(lane_reader *c) {
    int rc = guard_enter(&c->guard);
    if (rc != RING_OK) return rc;
    rc = reader_has_more(c);
    guard_leave(&c->guard);
    return rc;
}

uint32_t reader_fault_lane(const lane_reader *c) { return c->told_lane; }

uint64_t reader_fault_position(const lane_reader *c) { return c->told_position; }

static void start_at_tails(lane_reader *c) {
    for (uint32_t lane = 0; lane < c->ring.lanes; lane++)
        store_head(&head_at(&c->ring, c->index, lane)->head, load_tail(&lane_at(&c->ring, lane)->tail));
}

/* A cursor that was detached starts at the tails. A writer that looked at the heads before it saw the cursor
 * opening may fill up to a lane beyond the tail it had then; the second load of the tails, after the fence, is
 * at least that tail, so it cannot overrun what this cursor will read. The first heads may lie any distance
 * behind by the time the writer looks again, so it takes those of an opening cursor for no more than a lower
 * bound (least_head); they are there so that what it does see is one. */
static void attach_afresh(lane_reader *c) {
    start_at_tails(c);
    store_state(&c->shared->state, CURSOR_OPENING);
    fence_attached();
    start_at_tails(c);
    store_state(&c->shared->state, CURSOR_OPEN);
    fence_released();
}

static void write_bell_name(lane_reader *c) {
    consumer_block *k = c->shared;
    uint32_t turn = begin_turn(&k->bell_turn) | 1;
    for (int i = 0; i < 8; i++) poke(&k->bell[i], c->bell.words[i]);
    c->bell_turn = turn + 1;
    store_turn(&k->bell_turn, c->bell_turn);
}

void reader_tell_bell(lane_reader *c) {
    int same = peek_half(&c->shared->bell_turn) == c->bell_turn;
    for (int i = 0; same && i < 8; i++) same = peek(&c->shared->bell[i]) == c->bell.words[i];
    if (!same) write_bell_name(c);
}

static void adopt(lane_reader *c, uint64_t expected, const char *bell_name) {
    poke_half(&c->shared->parked, 0);
    strncpy(c->bell.text, bell_name, sizeof c->bell.text - 1);
    write_bell_name(c);
    /* Who was opening it died on the way: its heads are good for nothing, and nothing was read. */
    uint32_t state = load_state(&c->shared->state);
    int afresh = state == CURSOR_DETACHED || state == CURSOR_OPENING;
    if (afresh) attach_afresh(c);
    if (expected != 0) bump(&c->shared->takeovers, 1);
    /* The dead consumer may have taken a writer's flag and died before it woke it, and an opening cursor looks
     * like a full lane: wake them all. */
    for (uint32_t lane = 0; (expected != 0 || afresh) && lane < c->ring.lanes; lane++)
        wake_writer(lane_at(&c->ring, lane));
    for (uint32_t lane = 0; lane < c->ring.lanes; lane++) {
        cursor *k = &c->lanes[lane];
        k->head = k->next = load_head(&head_at(&c->ring, c->index, lane)->head);
        uint64_t tail = load_tail(&lane_at(&c->ring, lane)->tail);
        if (!sane_span(&c->ring, k->head, tail)) lane_fault(c, lane, k->head);
    }
}

int reader_claim(const ring *r, uint32_t index, uint64_t expected, uint64_t mine, const char *bell_name,
                 lane_reader **out) {
    if (index >= r->consumers || mine == 0) return RING_ARGUMENT;
    if (!bell_name_ok(bell_name, RING_NAME_BYTES)) return RING_NO_BELL;
    lane_reader *c = calloc(1, sizeof *c + r->lanes * sizeof(cursor));
    if (c == NULL) return RING_NO_MEMORY;
    c->ring = *r;
    c->index = index;
    c->shared = consumer_at(r, index);
    c->owner = mine;
    guard_init(&c->guard);
    if (!claim_owner(&c->shared->owner, expected, mine)) {
        free(c);
        return RING_OWNED;
    }
    adopt(c, expected, bell_name);
    *out = c;
    return RING_OK;
}

int reader_close(lane_reader *c) {
    int rc = guard_enter(&c->guard);
    if (rc != RING_OK) return rc;
    atomic_store(&c->guard.closed, 1);
    poke_half(&c->shared->parked, 0);
    claim_owner(&c->shared->owner, c->owner, 0);
    guard_leave(&c->guard);
    return RING_OK;
}

void reader_free(lane_reader *c) { free(c); }
