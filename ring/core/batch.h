/* The layout of a BATCH body, for whoever reads or writes one in C. It is drawn in ring/batch.py; Python takes these
 * numbers from here (python/body.c).
 *
 * A header of its own, like check.h: three rooms lay bodies out, and none of them links to another. */
#ifndef OUTFEED_BATCH_H
#define OUTFEED_BATCH_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "check.h"

enum {
    BATCH_VERSION = 1,
    BATCH_PREFIX = 16, /* sizeof(batch_prefix); then the msgpack header, padded to 8 */

    /* The core columns. Column k begins at its number times the rows: routes at 0. */
    BATCH_FIRST = 8,
    BATCH_COUNTS = 12,
    BATCH_PROMPTS = 16,
    BATCH_ROW = 20, /* bytes of all core columns per row; the ids stand behind them */
    BATCH_ID = 4,

    /* What the egress form has behind the ids: generated, text_lens, then the text, padded to 4. */
    BATCH_TEXT_LENS = 4,
    BATCH_EGRESS_ROW = 8,
};

typedef struct {
    uint32_t header_len, body_len;
    uint64_t check;
} batch_prefix;

_Static_assert(sizeof(batch_prefix) == BATCH_PREFIX && offsetof(batch_prefix, check) == 8, "the body begins so");
_Static_assert(BATCH_FIRST == sizeof(uint64_t), "routes are u64");
_Static_assert(BATCH_COUNTS == BATCH_FIRST + sizeof(uint32_t), "first is u32");
_Static_assert(BATCH_PROMPTS == BATCH_COUNTS + sizeof(uint32_t), "counts are u32");
_Static_assert(BATCH_ROW == BATCH_PROMPTS + sizeof(uint32_t), "prompt tokens are u32");
_Static_assert(BATCH_ID == sizeof(int32_t), "ids are i32");
_Static_assert(BATCH_EGRESS_ROW == BATCH_TEXT_LENS + sizeof(uint32_t), "generated and text_lens are u32");

static inline size_t batch_padded_header(uint32_t header_len) { return ((size_t)header_len + 7) & ~(size_t)7; }

/* The check over a body that is otherwise complete. */
static inline uint64_t batch_check(const uint8_t *body, size_t size, uint32_t header_len) {
    return outfeed_check_bytes(body + BATCH_PREFIX, size - BATCH_PREFIX, header_len);
}

/* Write the prefix: the last thing that a body needs. */
static inline void batch_seal(uint8_t *body, size_t size, uint32_t header_len) {
    batch_prefix prefix = {header_len, (uint32_t)size, batch_check(body, size, header_len)};
    memcpy(body, &prefix, sizeof prefix);
}

#endif
