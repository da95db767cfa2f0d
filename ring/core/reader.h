/* The reader's private state, shared by reader.c and wait.c. */

#ifndef OUTFEED_RING_READER_H
#define OUTFEED_RING_READER_H

#include "inner.h"

enum { LANE_GOOD = 0, LANE_FAULTY = 1 /* not told yet */, LANE_SKIPPED = 2 };

typedef struct cursor {
    uint64_t head; /* released up to here */
    uint64_t next; /* read up to here */
    uint64_t before; /* … by the reads before the last one */
    uint64_t fault;
    uint8_t state;
    uint8_t moved;
} cursor;

struct lane_reader {
    ring ring;
    guard guard;
    consumer_block *shared;
    uint64_t owner;
    uint64_t body_bytes;
    uint64_t told_position;
    uint32_t told_lane;
    int telling; /* the last read told of that lane's fault */
    uint32_t index;
    uint32_t turn;
    uint32_t faults; /* lanes in LANE_FAULTY */
    uint32_t bell_turn; /* the name's in the segment */
    bell_name bell;
    cursor lanes[];
};

/* What the segment is to say of this cursor, said (again, where something wrote over it): that it is open and how
 * far it has come. Nothing else would: writers would overrun a cursor that they take for detached, and a lane that
 * looks full because of its head stays full, for nothing comes to read that would move it. The caller holds the
 * guard. */
void reader_tell(lane_reader *c);

/* The same of its doorbell, without which each sleep lasts to its end. */
void reader_tell_bell(lane_reader *c);

/* Something reader_read would return or tell of. The caller holds the guard. */
int reader_has_more(lane_reader *c);

#endif
