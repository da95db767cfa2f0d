/* UTF-8, one unit at a time, with the errors cut as Rust's from_utf8_lossy and the WHATWG decoder cut them:
 * each maximal piece that could have begun a character is one U+FFFD.
 */
#ifndef OUTFEED_UTF8_H
#define OUTFEED_UTF8_H

#include <stddef.h>
#include <stdint.h>

enum utf8_kind { UTF8_VALID, UTF8_INVALID, UTF8_INCOMPLETE };

#define UTF8_REPLACEMENT "\xEF\xBF\xBD"
#define UTF8_REPLACEMENT_LEN 3u
/* How many bytes of a character are not its first, at most. */
#define UTF8_MOST_INSIDE 3u

/* Whether a byte of well-formed text is not a character's first. */
static inline int utf8_inside(uint8_t byte) { return (byte & 0xC0) == 0x80; }

/* Classify what `p` (n > 0 bytes) begins with; *len is the unit's length. INCOMPLETE means all n bytes are the
 * beginning of a character, so n is at most 3. */
static inline enum utf8_kind utf8_unit(const uint8_t *p, size_t n, unsigned *len)
{
    uint8_t b = p[0], low = 0x80, high = 0xBF;
    unsigned need;
    if (b < 0x80) {
        *len = 1;
        return UTF8_VALID;
    }
    if (b >= 0xC2 && b <= 0xDF) {
        need = 2;
    } else if (b >= 0xE0 && b <= 0xEF) {
        need = 3;
        if (b == 0xE0) low = 0xA0; /* overlong */
        if (b == 0xED) high = 0x9F; /* surrogates */
    } else if (b >= 0xF0 && b <= 0xF4) {
        need = 4;
        if (b == 0xF0) low = 0x90; /* overlong */
        if (b == 0xF4) high = 0x8F; /* above U+10FFFF */
    } else {
        *len = 1;
        return UTF8_INVALID;
    }
    for (unsigned i = 1; i < need; i++) {
        if (i >= n) {
            *len = (unsigned)n;
            return UTF8_INCOMPLETE;
        }
        if (p[i] < low || p[i] > high) {
            *len = i;
            return UTF8_INVALID;
        }
        low = 0x80;
        high = 0xBF;
    }
    *len = need;
    return UTF8_VALID;
}

#endif
