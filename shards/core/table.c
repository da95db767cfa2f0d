#include "table.h"

#include <string.h>

/* Every sum below is of numbers that were bounded first, so none can overflow 64 bits. */
bool table_open(table *out, const uint8_t *base, size_t len)
{
    table_header header;
    if (len < sizeof header || (uintptr_t)base % _Alignof(table_header)) return false;
    memcpy(&header, base, sizeof header);
    if (memcmp(header.magic, TABLE_MAGIC, 8) || header.version != TABLE_VERSION) return false;
    if (header.ids > TABLE_MAX_IDS || (header.firsts && header.firsts != header.ids)) return false;
    if (header.blob_len > UINT32_MAX || header.strip_len > 4) return false;
    if (header.strip_count && !header.strip_len) return false;
    if (header.strip_count > 255) return false;
    uint64_t entries = (uint64_t)header.ids * sizeof(table_entry);
    uint64_t firsts = (uint64_t)header.firsts * sizeof(table_entry);
    if (sizeof header + entries + firsts + header.blob_len + header.meta_len > len) return false;
    memset(out, 0, sizeof *out);
    out->entries = (const table_entry *)(base + sizeof header);
    out->firsts = header.firsts ? out->entries + header.ids : NULL;
    out->blob = base + sizeof header + entries + firsts;
    out->blob_len = header.blob_len;
    out->ids = header.ids;
    out->strip_count = header.strip_count;
    out->strip_len = header.strip_len;
    memcpy(out->strip_char, header.strip_char, 4);
    return true;
}
