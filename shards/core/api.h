/* What Python sees of the kernel: plain declarations, read by the C compiler and by cffi.
 *
 * A `shard` belongs to one thread. Functions that can fail return OFS_OK or one of the negative codes.
 * Pointers in `ofs_step` are valid until the next call that takes the same shard.
 */

typedef struct ofs_shard ofs_shard;

enum { OFS_OK = 0, OFS_NO_MEMORY = -1, OFS_BAD_TABLE = -2, OFS_TOO_MUCH = -3, OFS_TAKEN = -4, OFS_BAD_ROW = -5 };

/* The token table's numbers; core/table.h draws it. */
enum {
    OFS_TABLE_VERSION = 2,
    OFS_TABLE_HEADER = 64, /* bytes before the entries */
    OFS_TABLE_ENTRY = 16,  /* bytes of one: length, flags, and up to OFS_TABLE_INLINE bytes of text */
    OFS_TABLE_INLINE = 14,
    OFS_TABLE_LONG = 255,  /* the length of an entry whose text stands in the blob */
    OFS_TABLE_MAX_IDS = 1 << 24
};

/* Flags of a table entry. */
enum { OFS_SPECIAL = 1, OFS_BYTE = 2, OFS_CLEAN = 4, OFS_KNOWN = 8 };

/* Flags of a registration. */
enum { OFS_SKIP_SPECIAL = 1, OFS_NO_STOP_TRIM = 2, OFS_DETECT = 4 };

/* A registration's stop strings at most, and their bytes together: each byte takes up to 32 bytes of memory. */
enum { OFS_MAX_STOPS = 256, OFS_MAX_STOP_BYTES = 1 << 16 };

/* How a row ends: for no reason of its own, or by a stop that is to be trimmed. */
enum { OFS_END = 1, OFS_END_STRING = 2, OFS_END_TOKENS = 3 };

/* A row that ends its request; what it matched is bytes (a string) or i32 ids, at an offset in `matched`. */
typedef struct {
    uint32_t row, kind, offset, length;
} ofs_finish;

/* The rows that end, in row order. */
typedef struct {
    const ofs_finish *finishes;
    uint32_t count;
    const uint8_t *matched;
    size_t matched_len;
} ofs_finishes;

/* A step's columns; the caller has checked their lengths. Loads need no alignment. */
typedef struct {
    const uint64_t *routes;
    const uint32_t *first, *counts, *prompt_tokens;
    const int32_t *ids;
    uint32_t rows, tokens;
} ofs_rows;

/* Text made by the caller, for a shard without a table: every input token's text end to end and, after each
 * row's tokens, what the decoder still held at its end. `lens` has tokens + rows entries, tokens first. */
typedef struct {
    const uint8_t *text;
    size_t len;
    const uint32_t *lens;
} ofs_ready;

/* A request that cannot go on: tokens were lost, or its text did not fit. */
typedef struct {
    uint64_t route;
    uint32_t expected, first, count, code;
} ofs_failure;

/* A stop string that this shard found: the (output) row now ends there. */
typedef struct {
    uint32_t row, pattern;
} ofs_stop;

/* What one call of ofs_decode made. Row columns are in the order of the egress frame. */
typedef struct {
    uint32_t rows, tokens;
    uint64_t text_bytes;
    const uint64_t *routes;
    const uint32_t *first, *counts, *prompt_tokens;
    const int32_t *ids;
    const uint32_t *generated, *text_lens;
    const uint8_t *text;
    const uint32_t *source;     /* each output row's row in the step; of merged ones, the last */
    const uint32_t *token_ends; /* per output token: end of its text within its row (if asked for) */
    const ofs_failure *failures;
    const ofs_stop *stops;
    uint32_t row_cap, token_cap; /* the arrays' real lengths */
    uint32_t moves;              /* how often the arrays may have moved so far */
    uint32_t failure_count, stop_count;
    uint32_t other_readers; /* whether the step has rows of this shard for others: their bits in `others` */
    uint64_t others[4];
    uint32_t stale_rows; /* rows of this shard and reader whose request is not registered: dropped */
    uint32_t doubled;    /* rows that were decoded before */
} ofs_step;

/* Totals since the shard was made. `work` counts bytes and automaton steps: what the cost is linear in. */
typedef struct {
    uint64_t live, pages, tokens, text_bytes, work;
} ofs_totals;

/* One request's state, for tests and for a look at a live shard. */
typedef struct {
    uint64_t route;
    uint32_t expected, tail, run, held, ended;
} ofs_look;

/* `table` may be NULL (no table: every step brings its own text); it must outlive the shard. */
ofs_shard *ofs_new(const uint8_t *table, size_t table_len, int *error);
void ofs_free(ofs_shard *shard);
const ofs_step *ofs_result(const ofs_shard *shard);
ofs_totals ofs_total(const ofs_shard *shard);
int ofs_peek(const ofs_shard *shard, uint64_t route, ofs_look *look);

/* The text that a request has made and not sent; NULL: none. Valid until the next call that takes the shard. */
const uint8_t *ofs_held(const ofs_shard *shard, uint64_t route, uint32_t *len);

/* Start a request. `stops` are end to end, and one that OFS_DETECT finds complete with one of the first `least` - 1
 * tokens does not end it; the prompt's last ids are its context. OFS_TAKEN: it runs. */
int ofs_register(ofs_shard *shard, uint64_t route, uint32_t flags, const uint8_t *stops,
                 const uint32_t *stop_lens, uint32_t stop_count, uint32_t least, const int32_t *prompt,
                 uint32_t prompt_len, uint32_t prompt_tokens);

/* After ofs_register: decode what was delivered before, of which `text_bytes` bytes of text went out.
 * `ready` (one row) is for a shard without a table. The text that went out is in ofs_result() then, and in `made_by_part`
 * how many characters the first `part` of the ids had made, those held back for a stop string included. */
int ofs_restore(ofs_shard *shard, uint64_t route, const int32_t *ids, uint32_t count, uint64_t text_bytes,
                const ofs_ready *ready, uint32_t part, uint32_t *made_by_part);

/* 1 if the request was known. */
int ofs_forget(ofs_shard *shard, uint64_t route);

/* Nothing more comes out of this request: its later rows count as doubled. */
void ofs_end(ofs_shard *shard, uint64_t route);

/* Say where a step's columns are, which lie end to end in raw[size] from `at` on, in the order of ofs_rows. OFS_BAD_ROW:
 * they do not. `raw` is pointed into. */
int ofs_columns(ofs_rows *step, const uint8_t *raw, size_t size, size_t at, size_t rows, size_t tokens);

/* For each row of shard `number` and `reader`, how many of its ids are to be decoded: all, or without the
 * matched stop tokens; OFS_DROPPED for rows that ofs_decode would drop. A request may have several rows.
 * Changes no request. `finishes` may be NULL. */
#define OFS_DROPPED 0xFFFFFFFF
int ofs_plan(ofs_shard *shard, const ofs_rows *step, uint32_t number, uint32_t reader,
             const ofs_finishes *finishes, uint32_t *keep);

/* Decode a step's rows of shard `number` and `reader`; the result is in ofs_result(). `finishes` and, for a
 * shard with a table, `ready` may be NULL.
 *
 * With `merge`, the step is several joined end to end, and brings neither `ready` nor wants token ends. Each row is decoded as it would be alone, a request's in their order, and what they made
 * goes out as one row as long as its ids and text take at most `merge` bytes together. */
int ofs_decode(ofs_shard *shard, const ofs_rows *step, uint32_t number, uint32_t reader,
               const ofs_finishes *finishes, const ofs_ready *ready, int want_token_ends, uint32_t merge);

/* Make the last result a BATCH body behind the given header (msgpack): ring/batch.py's egress form, sealed.
 * Returns its length, *body until the next call; or OFS_NO_MEMORY, OFS_TOO_MUCH (longer than a frame can be). */
int64_t ofs_pack(ofs_shard *shard, const uint8_t *header, uint32_t header_len, const uint8_t **body);

/* Decode whole sequences, each a request of its own that begins and ends here: `counts` and `lens` (bytes of text)
 * have one entry per sequence, `ids` are end to end, the text is in ofs_result(). For proving a table. */
int ofs_decode_each(ofs_shard *shard, const int32_t *ids, const uint32_t *counts, uint32_t count, uint32_t flags,
                    uint32_t *lens);

/* One token's text on its own, as decode([id]) without skipping: bytes written, at most `room`, or negative. */
int64_t ofs_token_text(const ofs_shard *shard, int32_t id, uint8_t *out, size_t room);
