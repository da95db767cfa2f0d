/* The token table, as it lies in shared memory. Everything in it is checked before use.
 *
 *   0          8         12      16       20         24          32        36        40       44
 *   ┌──────────┬─────────┬───────┬────────┬──────────┬───────────┬─────────┬─────────┬────────┐
 *   │ magic    │ version │ ids   │ firsts │ meta_len │ blob_len  │ strip   │ strip   │ strip  │
 *   │ OUTFEEDT │ u32     │ u32   │ u32    │ u32      │ u64       │ count   │ char[4] │ len    │
 *   └──────────┴─────────┴───────┴────────┴──────────┴───────────┴─────────┴─────────┴────────┘
 *   64 │ entry[ids] │ entry[firsts] │ blob (blob_len bytes) │ meta (meta_len bytes of JSON)
 *
 * entry, 16 bytes: │ len u8 │ flags u8 │ the bytes, up to 14 │
 *             or:  │ 255    │ flags u8 │ u16 0 │ u32 offset into blob │ u32 length │ u32 0 │
 *
 * `firsts` is 0, or equal to ids: then a request's first token takes its bytes from the second array
 * (a decoder that treats the first token differently, such as Metaspace).
 */
#ifndef OUTFEED_TABLE_H
#define OUTFEED_TABLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "api.h"

#define TABLE_MAGIC "OUTFEEDT"
#define TABLE_VERSION ((uint32_t)OFS_TABLE_VERSION)
#define TABLE_MAX_IDS ((uint32_t)OFS_TABLE_MAX_IDS)
#define TABLE_INLINE ((uint32_t)OFS_TABLE_INLINE)
#define TABLE_LONG ((uint32_t)OFS_TABLE_LONG)
#define TABLE_HEADER ((uint32_t)OFS_TABLE_HEADER)

typedef struct {
    char magic[8];
    uint32_t version, ids, firsts, meta_len;
    uint64_t blob_len;
    uint32_t strip_count;
    uint8_t strip_char[4];
    uint32_t strip_len;
    uint8_t reserved[20];
} table_header;

typedef union {
    struct {
        uint8_t len, flags, bytes[TABLE_INLINE];
    };
    struct {
        uint32_t head, offset, length, zero;
    } in_blob; /* when len is TABLE_LONG */
} table_entry;

_Static_assert(sizeof(table_header) == TABLE_HEADER, "the entries begin behind it");
_Static_assert(offsetof(table_header, version) == 8, "layout");
_Static_assert(offsetof(table_header, ids) == 12, "layout");
_Static_assert(offsetof(table_header, firsts) == 16, "layout");
_Static_assert(offsetof(table_header, meta_len) == 20, "layout");
_Static_assert(offsetof(table_header, blob_len) == 24, "layout");
_Static_assert(offsetof(table_header, strip_count) == 32, "layout");
_Static_assert(offsetof(table_header, strip_char) == 36, "layout");
_Static_assert(offsetof(table_header, strip_len) == 40, "layout");
_Static_assert(sizeof(table_entry) == OFS_TABLE_ENTRY, "one entry, one cache access");

/* A table that was checked; sizes are copied out, so that later changes in shared memory cannot move them. */
typedef struct {
    const table_entry *entries, *firsts;
    const uint8_t *blob;
    uint64_t blob_len;
    uint32_t ids, strip_count, strip_len;
    uint8_t strip_char[4];
} table;

typedef struct {
    const uint8_t *bytes;
    uint32_t len;
    uint8_t flags; /* 0: no such token, decodes to nothing */
} table_token;

/* Numbers are loaded once, into locals: what is checked is what is used, whatever another process writes meanwhile. */
static inline uint8_t table_load8(const uint8_t *at) { return *(const volatile uint8_t *)at; }
static inline uint32_t table_load32(const uint32_t *at) { return *(const volatile uint32_t *)at; }

bool table_open(table *out, const uint8_t *base, size_t len);

static inline table_token table_get(const table *t, int32_t id, bool first)
{
    table_token token = {(const uint8_t *)"", 0, 0};
    if ((uint32_t)id >= t->ids) return token; /* negative ids are large here */
    const table_entry *entry = (first && t->firsts ? t->firsts : t->entries) + (uint32_t)id;
    uint8_t len = table_load8(&entry->len), flags = table_load8(&entry->flags);
    if (len <= TABLE_INLINE) return (table_token){entry->bytes, len, flags};
    uint32_t offset = table_load32(&entry->in_blob.offset), length = table_load32(&entry->in_blob.length);
    if (len != TABLE_LONG || length <= TABLE_INLINE || (uint64_t)offset + length > t->blob_len) return token;
    return (table_token){t->blob + offset, length, flags};
}

#endif
