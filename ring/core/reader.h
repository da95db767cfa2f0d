/* The reader's private state, shared by reader.c and wait.c. */

#ifndef OUTFEED_RING_READER_H
#define OUTFEED_RING_READER_H

#include "inner.h"

enum { LANE_GOOD = 0, LANE_FAULTY = 1 /* not told yet */, LANE_SKIPPED = 2 };

typedef struct cursor {
    uint64_t head; /* released up to here */
    uint64_t next; /* read up to here */
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
    uint32_t index;
    uint32_t turn;
    uint32_t faults; /* lanes in LANE_FAULTY */
    cursor lanes[];
};

/* Something reader_read would return or tell of. The caller holds the guard. */
int reader_has_more(lane_reader *c);

#endif
