/* What a scheduler's port remembers of one slot of one reader. */
typedef struct {
    uint64_t route;   /* the request that has the slot, 0 before the first */
    uint32_t emitted; /* its output tokens pushed so far */
    uint32_t prompt;  /* its prompt tokens */
    uint32_t live;    /* 1 until a finish reason or an abort ended it */
    uint32_t pad;
} outfeed_slot;

/* Fill first[] and prompt[] for `rows` rows and count their tokens in. Returns
 * the tokens of the whole step, or -1 - row for a row whose route cannot be a route of this table or whose
 * slot has never had a request; then nothing has been counted. Rows of ended requests, and of those that
 * had the slot before, get first = 0 and are counted in *stale. */
int64_t outfeed_rows_advance(outfeed_slot *table, uint32_t readers, uint32_t slots, uint32_t rows,
                             const uint64_t *routes, const uint32_t *counts, uint32_t *first,
                             uint32_t *prompt, uint32_t *stale);

/* Take back what outfeed_rows_advance counted in for the same rows. */
void outfeed_rows_retract(outfeed_slot *table, uint32_t slots, uint32_t rows, const uint64_t *routes,
                          const uint32_t *counts);
