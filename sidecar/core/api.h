/* What a scheduler's port remembers of one slot of one reader. */
typedef struct {
    uint64_t route;   /* the request that has the slot, 0 before the first */
    uint32_t emitted; /* its output tokens pushed so far */
    uint32_t prompt;  /* its prompt tokens */
    uint32_t live;    /* 1 until a finish reason or an abort ended it */
    uint32_t pad;
} outfeed_slot;

/* All slots: readers x slots entries. `stale` counts rows pushed for requests that had ended. */
typedef struct {
    outfeed_slot *slots;
    uint32_t readers;
    uint32_t slots_each;
    uint64_t stale;
} outfeed_table;

enum { OUTFEED_TOKENS = -1, OUTFEED_ROOM = -2, OUTFEED_ROUTE = -16 };

/* Write a BATCH body, step form, into out[room]: prefix, `header` (padded), and the columns, with `first` and
 * prompt tokens from the table, and count the step's tokens in. `routes` is u64[rows], `counts` u32[rows] or
 * NULL for one token each, `ids` i32[tokens]. Returns the body's size, or
 *   OUTFEED_TOKENS        the counts do not sum to `tokens`
 *   OUTFEED_ROOM          the body does not fit `room`
 *   OUTFEED_ROUTE - row   this row's route cannot be a route of the table, or its slot never had a request
 * and then nothing has been counted. Rows of ended requests, and of those that had the slot before, get
 * first = 0: the shard drops them. */
int64_t outfeed_step(outfeed_table *table, const void *header, uint32_t header_len, uint32_t rows,
                     const void *routes, const void *counts, uint32_t tokens, const void *ids, void *out,
                     uint64_t room);

/* The same for `first` and prompt alone, for a step that is encoded elsewhere. Returns the tokens. */
int64_t outfeed_rows_advance(outfeed_table *table, uint32_t rows, const void *routes, const void *counts,
                             uint32_t *first, uint32_t *prompt);

/* Take back what either counted in for the same rows. */
void outfeed_rows_retract(outfeed_table *table, uint32_t rows, const void *routes, const void *counts);
