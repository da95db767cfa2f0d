/* What a live request waits for: rows, or one answer, or rows that another rank may push. */
enum outfeed_kind { OUTFEED_GENERATE = 1, OUTFEED_CONTROL = 2, OUTFEED_RECEIVED = 3 };

/* What a scheduler's port remembers of one slot of one reader. */
typedef struct {
    uint64_t route;   /* the request that has the slot, 0 before the first */
    uint32_t emitted; /* its output tokens pushed so far */
    uint32_t prompt;  /* its prompt tokens */
    uint32_t live;    /* an outfeed_kind until a finish reason, an answer or an abort ended it, then 0 */
    uint32_t pad;
} outfeed_slot;

/* All slots: readers x slots entries. The rest counts: live requests (not those received alone), what was pushed, and
 * rows for requests that had ended. */
typedef struct {
    outfeed_slot *slots;
    uint32_t readers;
    uint32_t slots_each;
    uint64_t live;
    uint64_t steps;
    uint64_t rows;
    uint64_t tokens;
    uint64_t stale_rows;
} outfeed_table;

/* Rows of one step at most. */
enum { OUTFEED_MAX_ROWS = 65536 };

/* Refusals of a step. They lie below the ring's own codes (ring/core/api.h), so that one number tells both. */
enum {
    OUTFEED_TOKENS = -32, /* the counts do not sum to the number of ids */
    OUTFEED_ROWS = -41,   /* no rows, or too many */
    OUTFEED_COUNTS = -42, /* not one count per row */
    OUTFEED_IDS = -44,    /* an id below 0 */
    OUTFEED_ROUTE = -64   /* minus the row whose route is refused: must be the lowest */
};

/* One decode step, as its caller has it: columns are checked for their types and lengths, not for what is
 * in them, and may lie at any address. `counts` NULL stands for one token each. `endings` and `families` are the
 * msgpack arrays of [row, finish reason] pairs and of the optional families' sizes, which go into the header as they
 * are; `optional` is those families' columns, end to end. */
typedef struct {
    uint64_t stamp_ns;
    const void *routes; /* u64[rows] */
    const void *counts; /* u32[rows] */
    const void *ids;    /* i32[tokens] */
    const uint8_t *endings;
    const uint8_t *families;
    const uint8_t *optional;
    uint64_t optional_len;
    uint32_t rows;
    uint32_t tokens;
    uint32_t endings_len;
    uint32_t families_len;
} outfeed_decode_step;

/* The size of a step's BATCH body (step form). */
uint64_t outfeed_step_size(const outfeed_decode_step *step);

/* Write that body into out[outfeed_step_size(step)], 8-aligned, with `first` and prompt tokens from the
 * table, and count the step in. Returns 0, or
 *   OUTFEED_IDS           an id is negative
 *   OUTFEED_TOKENS        the counts do not sum to `tokens`
 *   OUTFEED_ROUTE - row   this row's route cannot be a route of the table, its slot never had a request, or it
 *                         is a live control request's
 * and then nothing has been counted. Rows of ended requests, and of those that had the slot before, get
 * first = 0: the shard drops them. */
int64_t outfeed_step(outfeed_table *table, const outfeed_decode_step *step, uint8_t *out);

/* Take back what it counted in: the step was written and could not be published. */
void outfeed_step_retract(outfeed_table *table, const outfeed_decode_step *step);

/* Note a received request of a kind. Returns 1, 0 when it is live already (its count goes on), -1 for no route of
 * the table. */
int outfeed_rows_open(outfeed_table *table, uint64_t route, uint32_t prompt, uint32_t kind);

/* Note that a request's rows come from here. Returns 1, 0 when that was noted or it has ended, -1 for no route of the
 * table. */
int outfeed_rows_adopt(outfeed_table *table, uint64_t route, uint32_t prompt);

/* Note that a request has ended. Returns 1, 0 when it was not live, -1 for no route of the table. */
int outfeed_rows_end(outfeed_table *table, uint64_t route);
void outfeed_rows_end_all(outfeed_table *table, const uint64_t *routes, uint32_t count);

/* The kind of a live request, 0 when it is not live, -1 for no route of the table. */
int outfeed_rows_live(const outfeed_table *table, uint64_t route);
