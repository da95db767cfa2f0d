/* Writing a lane. The tail lives here, in the writer; shared memory only gets copies of it, so what
 * another process scribbles over the segment can stop a writer but not lead it outside its area. */

#include "inner.h"

#include <stdlib.h>
#include <string.h>

#define SPIN_BEFORE_PARK_NS 5000

struct lane_writer {
    ring ring;
    guard guard;
    lane_block *shared;
    uint8_t *area;
    uint64_t tail;
    uint64_t limit;    /* positions below this are known to be free; heads are looked at when it is too low */
    uint64_t body_at;  /* open reservation: position of its record, or NONE */
    uint64_t body_max; /* … and the size reserved */
    uint64_t owner;
    uint64_t fault;
    uint32_t lane;
    int waiting; /* this full event is counted already */
    caller callers[];
};

#define NONE UINT64_MAX

/* The shared words are as the ring's rules allow: every open cursor at most a lane behind. On success
 * *least is the lowest of them (the tail itself when all are detached), else the position at fault. Of a cursor
 * that is just opening nothing is known but that it will not start further back than a lane (attach_afresh). */
static int least_head(const ring *r, uint32_t lane, uint64_t tail, uint64_t *least) {
    uint64_t low = tail;
    fence_heads();
    for (uint32_t i = 0; i < r->consumers; i++) {
        uint32_t state = load_state(&consumer_at(r, i)->state);
        if (state == CURSOR_DETACHED) continue;
        uint64_t head = load_head(&head_at(r, i, lane)->head);
        if (state == CURSOR_OPENING && !sane_span(r, head, tail))
            head = tail > r->capacity ? tail - r->capacity : 0;
        if (!sane_span(r, head, tail)) {
            *least = head;
            return RING_CORRUPT;
        }
        if (head < low) low = head;
    }
    *least = low;
    return RING_OK;
}

static int found_corrupt(lane_writer *w, uint64_t position) {
    w->fault = position;
    quarantine(&w->ring, w->lane, position);
    return RING_CORRUPT;
}

static int look_at_heads(lane_writer *w) {
    uint64_t least;
    if (least_head(&w->ring, w->lane, w->tail, &least) != RING_OK) return found_corrupt(w, least);
    w->limit = least + w->ring.capacity;
    raise_to(&w->shared->high_water, w->tail - least);
    return RING_OK;
}

static int check_quarantine(lane_writer *w) {
    uint64_t q = peek(&w->shared->quarantine);
    if (q == 0) return RING_OK;
    w->fault = q & ~UINT64_C(1);
    return RING_CORRUPT;
}

/* Where a record of `need` bytes would end, with the padding before it when it does not fit in one piece. */
static uint64_t end_of(const lane_writer *w, uint64_t need) {
    uint64_t left = w->ring.capacity - (w->tail & (w->ring.capacity - 1));
    return w->tail + need + (left < need ? left : 0);
}

/* 1 when positions below `end` are free. */
static int has_room(lane_writer *w, uint64_t end) {
    if (end <= w->limit) return 1;
    int rc = look_at_heads(w);
    if (rc != RING_OK) return rc;
    return end <= w->limit;
}

/* Sleep until a release may have made room, or the deadline. */
static int park(lane_writer *w, uint64_t end, int64_t deadline) {
    lane_block *l = w->shared;
    /* Not worth waking for a single frame's room: an eighth of the lane besides. That is never beyond the tail, where
     * no head would come: a record and the padding before it take no more than half a lane and a header. */
    poke(&l->room_wanted, end - w->ring.capacity + w->ring.capacity / 8);
    set_flag(&l->room_parked);
    fence_room();
    int rc = check_quarantine(w);
    if (rc == RING_OK) rc = has_room(w, end);
    if (rc == 0) {
        int64_t left = deadline - now_ns();
        if (left > 0 && futex_sleep(&l->room_parked, 1, left) == RING_INTERRUPTED) rc = RING_INTERRUPTED;
    }
    poke_half(&l->room_parked, 0);
    return rc;
}

/* At most LONGEST_SLEEP_NS of a longer wait: a signal that comes when the sleep has not quite begun does not end
 * it, so whoever has handlers to run gets to look for one that often, whatever the words in the lane say. */
static int wait_for_room(lane_writer *w, uint64_t end, int64_t timeout_ns) {
    if (!w->waiting) bump(&w->shared->full_events, 1);
    w->waiting = 1;
    if (timeout_ns <= 0) return RING_FULL;
    int64_t start = now_ns(), now = start;
    int64_t deadline = start + (timeout_ns < LONGEST_SLEEP_NS ? timeout_ns : LONGEST_SLEEP_NS);
    int rc = 0;
    while (rc == 0 && now < deadline) {
        relax();
        rc = now - start < SPIN_BEFORE_PARK_NS ? has_room(w, end) : park(w, end, deadline);
        if (rc == 0) rc = check_quarantine(w);
        now = now_ns();
    }
    if (rc == 0) rc = has_room(w, end);
    bump(&w->shared->full_ns, (uint64_t)(now_ns() - start));
    if (rc == 0) return timeout_ns > LONGEST_SLEEP_NS ? RING_INTERRUPTED : RING_FULL;
    return rc;
}

/* Room for a body of `size` bytes: writes the padding record if one is needed (nobody sees it yet) and
 * tells where the record goes. */
static int make_room(lane_writer *w, uint64_t size, int64_t timeout_ns, uint64_t *at) {
    uint64_t need = record_bytes(size), end = end_of(w, need);
    int rc = check_quarantine(w);
    if (rc == RING_OK) rc = has_room(w, end);
    if (rc == 0) rc = wait_for_room(w, end, timeout_ns);
    if (rc != 1) {
        if (rc != RING_INTERRUPTED && timeout_ns >= 0) w->waiting = 0;
        return rc;
    }
    w->waiting = 0;
    *at = end - need;
    if (*at != w->tail) {
        uint64_t left = *at - w->tail - RING_RECORD_HEADER;
        record pad = {.body_len = (uint32_t)left, .flags = RECORD_PAD, .seq = w->tail};
        memcpy(w->area + (w->tail & (w->ring.capacity - 1)), &pad, sizeof pad);
    }
    return RING_OK;
}

/* The body at `at` is complete: make it visible and wake who sleeps. */
static void publish(lane_writer *w, uint64_t at, int tag, uint64_t size) {
    record r = {.body_len = (uint32_t)size, .tag = (uint8_t)tag, .seq = at};
    memcpy(w->area + (at & (w->ring.capacity - 1)), &r, sizeof r);
    w->tail = at + record_bytes(size);
    store_tail(&w->shared->tail, w->tail);
    fence_published();
    for (uint32_t i = 0; i < w->ring.consumers; i++) {
        consumer_block *c = consumer_at(&w->ring, i);
        if (see_flag(&c->parked) && take_flag(&c->parked)) {
            call_consumer(c, &w->callers[i]);
            bump(&w->shared->bells_rung, 1);
        }
    }
    bump(&w->shared->frames, 1);
    bump(&w->shared->body_bytes, size);
}

static int write_parts(lane_writer *w, int tag, const part *parts, uint32_t count, int64_t timeout_ns) {
    if (tag < 0 || tag > 255 || count > RING_MAX_PARTS) return RING_ARGUMENT;
    if (w->body_at != NONE) return RING_RESERVED;
    uint64_t size = 0, most = largest_body(&w->ring), at;
    for (uint32_t i = 0; i < count; i++) {
        if (parts[i].length > most || (size += parts[i].length) > most) return RING_TOO_LARGE;
    }
    int rc = make_room(w, size, timeout_ns, &at);
    if (rc != RING_OK) return rc;
    uint8_t *to = w->area + (at & (w->ring.capacity - 1)) + RING_RECORD_HEADER;
    for (uint32_t i = 0; i < count; i++) {
        if (parts[i].length) memcpy(to, parts[i].bytes, parts[i].length);
        to += parts[i].length;
    }
    publish(w, at, tag, size);
    return RING_OK;
}

int writer_write(lane_writer *w, int tag, const part *parts, uint32_t count, int64_t timeout_ns) {
    int rc = guard_enter(&w->guard);
    if (rc != RING_OK) return rc;
    rc = write_parts(w, tag, parts, count, timeout_ns);
    guard_leave(&w->guard);
    return rc;
}

int writer_reserve(lane_writer *w, uint64_t size, int64_t timeout_ns, uint64_t *offset) {
    int rc = guard_enter(&w->guard);
    if (rc != RING_OK) return rc;
    if (w->body_at != NONE)
        rc = RING_RESERVED;
    else if (size > largest_body(&w->ring))
        rc = RING_TOO_LARGE;
    else {
        uint64_t at;
        rc = make_room(w, size, timeout_ns, &at);
        if (rc == RING_OK) {
            w->body_at = at;
            w->body_max = size;
            *offset = place(&w->ring, w->lane, at) + RING_RECORD_HEADER;
        }
    }
    guard_leave(&w->guard);
    return rc;
}

int writer_commit(lane_writer *w, int tag, uint64_t size) {
    int rc = guard_enter(&w->guard);
    if (rc != RING_OK) return rc;
    if (w->body_at == NONE)
        rc = RING_RESERVED;
    else if (tag < 0 || tag > 255)
        rc = RING_ARGUMENT;
    else if (size > w->body_max)
        rc = RING_TOO_LARGE;
    else {
        rc = check_quarantine(w);
        if (rc == RING_OK) publish(w, w->body_at, tag, size);
        w->body_at = NONE; /* also of a lane that is closed: there is nothing left to commit to */
    }
    guard_leave(&w->guard);
    return rc;
}

int writer_cancel(lane_writer *w) {
    int rc = guard_enter(&w->guard);
    if (rc != RING_OK) return rc;
    if (w->body_at == NONE) rc = RING_RESERVED;
    w->body_at = NONE;
    guard_leave(&w->guard);
    return rc;
}

uint64_t writer_fault(const lane_writer *w) { return w->fault; }

/* Fill a claimed writer from what the lane's last owner left: only whole frames lie below its tail. */
static int adopt(lane_writer *w, uint64_t expected) {
    lane_block *l = w->shared;
    w->tail = load_tail(&l->tail);
    poke_half(&l->room_parked, 0);
    if (expected != 0) {
        bump(&l->takeovers, 1);
        /* The dead writer may have taken a parked flag and died before it rang: ring for it. */
        for (uint32_t i = 0; i < w->ring.consumers; i++) call_consumer(consumer_at(&w->ring, i), &w->callers[i]);
    }
    int rc = check_quarantine(w);
    if (rc != RING_OK) return rc;
    if (!sane_span(&w->ring, w->tail, w->tail)) return found_corrupt(w, w->tail);
    return look_at_heads(w);
}

int writer_claim(const ring *r, uint32_t lane, uint64_t expected, uint64_t mine, lane_writer **out) {
    if (lane >= r->lanes || mine == 0) return RING_ARGUMENT;
    lane_writer *w = calloc(1, sizeof *w + r->consumers * sizeof(caller));
    if (w == NULL) return RING_NO_MEMORY;
    w->ring = *r;
    w->shared = lane_at(r, lane);
    w->area = r->base + place(r, lane, 0);
    w->lane = lane;
    w->body_at = NONE;
    w->owner = mine;
    guard_init(&w->guard);
    if (!claim_owner(&w->shared->owner, expected, mine)) {
        free(w);
        return RING_OWNED;
    }
    *out = w; /* also on a fault, which the caller asks it about */
    int rc = adopt(w, expected);
    if (rc != RING_OK) claim_owner(&w->shared->owner, mine, 0);
    return rc;
}

int writer_close(lane_writer *w) {
    int rc = guard_enter(&w->guard);
    if (rc != RING_OK) return rc;
    atomic_store(&w->guard.closed, 1);
    claim_owner(&w->shared->owner, w->owner, 0);
    guard_leave(&w->guard);
    return RING_OK;
}

void writer_free(lane_writer *w) {
    if (w == NULL) return;
    for (uint32_t i = 0; i < w->ring.consumers; i++) caller_close(&w->callers[i]);
    free(w);
}
