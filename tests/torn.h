/* Memory whose words change between any two looks at them: what a hostile process could do at every instant, done at
 * every load in turn and again from the same seed.
 *
 * Build what looks with clang's -fsanitize-coverage=trace-pc-guard,trace-loads (the
 * second does nothing alone), best with -O0, where each look of the source is a load:
 * before a load of watched memory the word is changed now and then, and after it, usually, changed back. So what was
 * checked in one load and is used by another is not the same. */
#ifndef TORN_H
#define TORN_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define UNWATCHED __attribute__((no_sanitize("coverage")))

static struct {
    uint8_t *base, *changed;
    size_t bytes, size;
    uint64_t state, old, put, changes;
} torn;

/* Watch this memory, from a seed. */
static inline void torn_begin(void *base, size_t bytes, uint64_t seed) {
    torn.base = base;
    torn.bytes = bytes;
    torn.state = (seed + 1) * UINT64_C(0x9E3779B97F4A7C15);
    torn.changed = NULL;
}

UNWATCHED static uint64_t torn_next(void) {
    torn.state ^= torn.state << 13;
    torn.state ^= torn.state >> 7;
    torn.state ^= torn.state << 17;
    return torn.state;
}

/* Change back what was changed last, unless somebody has written there since; once in a while leave it. */
UNWATCHED static void torn_mend(void) {
    if (torn.changed == NULL) return;
    if (torn_next() % 16 && memcmp(torn.changed, &torn.put, torn.size) == 0)
        memcpy(torn.changed, &torn.old, torn.size);
    torn.changed = NULL;
}

UNWATCHED static void torn_before(void *at, size_t size) {
    static const uint64_t liked[] = {0, 1, 2, 8, 15, 16, 64, 255, 1024, 1040, 4096, UINT32_MAX, UINT64_MAX - 15};
    uint8_t *place = at;
    if (torn.base == NULL || place < torn.base || place + size > torn.base + torn.bytes) return;
    torn_mend();
    if (torn_next() % 8) return;
    uint64_t pick = torn_next(), by = liked[(pick >> 8) % (sizeof liked / sizeof *liked)], old = 0;
    memcpy(&old, place, size);
    uint64_t put = (pick & 3) == 0 ? by : (pick & 3) == 1 ? old + by : (pick & 3) == 2 ? old - by : pick >> 16;
    memcpy(place, &put, size);
    torn.changed = place;
    torn.size = size;
    torn.old = old;
    torn.put = put;
    torn.changes++;
}

UNWATCHED void __sanitizer_cov_load1(uint8_t *at) { torn_before(at, 1); }
UNWATCHED void __sanitizer_cov_load2(uint16_t *at) { torn_before(at, 2); }
UNWATCHED void __sanitizer_cov_load4(uint32_t *at) { torn_before(at, 4); }
UNWATCHED void __sanitizer_cov_load8(uint64_t *at) { torn_before(at, 8); }
UNWATCHED void __sanitizer_cov_load16(__uint128_t *at) { torn_before(at, 8); }

#endif
