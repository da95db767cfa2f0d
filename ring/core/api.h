/* What Python may call. Plain declarations: this is the C header and cffi's cdef at once.
 *
 * Every function that can fail returns one of RING_*; none trusts a byte of the segment. Handles are
 * process-private, hold their own copy of the geometry, and refuse use by two threads at once and by a
 * child forked after they were made. */

enum {
    RING_OK = 0,
    RING_FULL = -1,        /* no room in the lane by the deadline */
    RING_TOO_LARGE = -2,   /* body above a quarter of the lane */
    RING_CORRUPT = -3,     /* the lane is quarantined; *_fault() tells where */
    RING_BUSY = -4,        /* another thread is inside this handle */
    RING_CLOSED = -5,      /* closed, or made before a fork */
    RING_INTERRUPTED = -6, /* a signal came, or may have; call again with what is left of the time */
    RING_RESERVED = -7,    /* a reservation is open and must not be, or is not and must be */
    RING_ARGUMENT = -8,    /* an argument out of range */
    RING_NO_MEMORY = -9,
    RING_OWNED = -10,      /* the owner word was not the expected one */
    RING_NOT_A_RING = -11, /* wrong magic */
    RING_VERSION = -12,    /* wrong layout version */
    RING_GEOMETRY = -13,   /* lanes, consumers, capacity or size out of limits or not adding up */
    RING_NO_BELL = -14     /* the doorbell's name is malformed or nothing usable has it */
};

/* Limits; the Python side reads them from here. */
enum {
    RING_LAYOUT_VERSION = 3,
    RING_MAX_LANES = 256,
    RING_MAX_CONSUMERS = 256,
    RING_MIN_CAPACITY = 4096,
    RING_MAX_CAPACITY = 1073741824,
    RING_MAX_PARTS = 256,
    RING_MAX_BATCH = 4096,
    RING_NAME_BYTES = 64,
    RING_BELL_BYTES = 256,
    RING_RECORD_HEADER = 16,
    RING_RECORD_ALIGN = 16,
    RING_LONGEST_TIMEOUT_S = 3600
};

/* Geometry and the segment (segment.c). */

typedef struct ring {
    uint8_t *base;
    uint64_t bytes;
    uint64_t capacity; /* per lane, a power of two */
    uint64_t data;     /* offset of lane 0's area */
    uint64_t heads;    /* offset of the heads table */
    uint64_t created_ns;
    uint64_t space; /* as ring_format was given it */
    uint32_t lanes;
    uint32_t consumers;
} ring;

/* Bytes a segment of this geometry takes; 0 when the geometry is out of limits. */
uint64_t ring_bytes(uint32_t lanes, uint32_t consumers, uint64_t capacity);
/* Write a fresh header into zeroed memory of ring_bytes() bytes. `creator` is an owner word, `space` says what pids in
 * owner words count in. */
int ring_format(void *base, uint64_t bytes, uint32_t lanes, uint32_t consumers, uint64_t capacity,
                const char *name, uint64_t creator, uint64_t space);
/* Check a header and fill *out; found[4] gets what was there: magic or version, lanes, consumers, capacity. */
int ring_check(void *base, uint64_t bytes, ring *out, uint64_t found[4]);

/* Ownership (claim.c). Owner words are made by owner.py; 0 is nobody. */

uint64_t lane_owner(const ring *r, uint32_t lane);
uint64_t consumer_owner(const ring *r, uint32_t index);
/* Detach a cursor whose owner word is `expected` (nobody or a dead owner). */
int consumer_detach(const ring *r, uint32_t index, uint64_t expected, uint64_t mine);

/* Doorbells (bell.c). */

typedef struct bell bell;
/* Write a fresh doorbell's RING_BELL_BYTES, zeroed before, for this owner. */
int bell_format(void *base, uint64_t bytes, uint64_t owner);
/* RING_OK when these bytes are a doorbell's. The calls below ask for no less. */
int bell_check(const void *base, uint64_t bytes);
uint64_t bell_owner(const void *base);
/* Take over a doorbell whose owner word is `expected`; it becomes `mine`. */
int bell_claim(void *base, uint64_t expected, uint64_t mine);
/* Use one's own. `base` must outlive it. It spins at most `longest_spin_ns` before it sleeps; 0: it sleeps at once. */
bell *bell_open(void *base, int64_t longest_spin_ns);
void bell_close(bell *b);
void bell_free(bell *b);
int bell_ring(bell *b);

/* Writing a lane (writer.c). */

typedef struct lane_writer lane_writer;
typedef struct part {
    const void *bytes;
    uint64_t length;
} part;

/* Claim: the lane's owner word must be `expected`; it becomes `mine`. */
int writer_claim(const ring *r, uint32_t lane, uint64_t expected, uint64_t mine, lane_writer **out);
/* Give the lane back. The handle refuses everything from then on. */
int writer_close(lane_writer *w);
void writer_free(lane_writer *w);
/* A full lane is waited for up to timeout_ns; 0: not at all; -1: not yet, the same call with a time follows. */
int writer_write(lane_writer *w, int tag, const part *parts, uint32_t count, int64_t timeout_ns);
/* *offset gets the body's offset in the segment. */
int writer_reserve(lane_writer *w, uint64_t size, int64_t timeout_ns, uint64_t *offset);
int writer_commit(lane_writer *w, int tag, uint64_t size);
int writer_cancel(lane_writer *w);
uint64_t writer_fault(const lane_writer *w);

/* Reading (reader.c). */

typedef struct lane_reader lane_reader;
typedef struct frames {
    uint32_t *lane;
    uint32_t *tag;
    uint64_t *start; /* offset of the body in the segment */
    uint64_t *end;
} frames;

int reader_claim(const ring *r, uint32_t index, uint64_t expected, uint64_t mine, const char *bell_name,
                 lane_reader **out);
int reader_close(lane_reader *c);
void reader_free(lane_reader *c);
/* Frames read (0 when there is none), or RING_CORRUPT for a fault not told yet, or another RING_*. */
int reader_read(lane_reader *c, uint32_t limit, const uint64_t *upto, const frames *out);
/* What the last reader_read found, frames or a fault, could not be handed on: the next one finds it again. */
int reader_unread(lane_reader *c);
int reader_release(lane_reader *c);
int reader_tails(lane_reader *c, uint64_t *out);
int reader_pending(lane_reader *c);
/* The fault that reader_read last told of. */
uint32_t reader_fault_lane(const lane_reader *c);
uint64_t reader_fault_position(const lane_reader *c);

/* Waiting for frames (wait.c): 1 something is there, 0 time is up or the bell was rung by hand. */
int readers_wait(bell *b, lane_reader *const *readers, uint32_t count, int64_t timeout_ns);

/* Statistics (stats.c): any process, any time; each number is read whole, the set is not a snapshot. */

typedef struct lane_stats {
    uint64_t owner, tail, used, frames, bytes, full_events, full_ns, high_water, bells_rung, takeovers;
    uint64_t quarantine; /* position | 1, or 0 */
} lane_stats;

typedef struct consumer_stats {
    uint64_t owner, detached, parked, frames, bytes, batches, parks, wakes, takeovers;
    uint64_t lag; /* bytes published and not released, over all lanes */
} consumer_stats;

int ring_lane_stats(const ring *r, uint32_t lane, lane_stats *out);
int ring_consumer_stats(const ring *r, uint32_t index, consumer_stats *out);
