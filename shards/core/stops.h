/* Stop strings: an Aho-Corasick automaton per request, over the UTF-8 bytes of its text.
 *
 * A node is a prefix of some stop string; the automaton's node after any text is the longest suffix of that
 * text that is such a prefix, so `hold` (how much of the text could still become a stop) is exact and one
 * text byte costs constant time, amortised.
 */
#ifndef OUTFEED_STOPS_H
#define OUTFEED_STOPS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define STOPS_NONE UINT32_MAX

typedef struct {
    uint32_t child, next, fail; /* node 0 is the root, and no node's child: 0 is "none" */
    uint32_t hold;              /* longest suffix here that more text could complete to a stop */
    uint32_t match;             /* the longest stop string that ends here, or STOPS_NONE */
    uint8_t byte;
} stop_node;

typedef struct {
    uint32_t nodes;
    uint8_t begins[32];  /* bit per byte: some stop string begins with it */
    uint32_t *lens;      /* of the stop strings, in bytes */
    stop_node node[];
} stop_set;

/* NULL when there is no memory; the caller has checked the two limits. Empty strings match nothing. */
stop_set *stops_new(const uint8_t *bytes, const uint32_t *lens, uint32_t count);
void stops_free(stop_set *set);

static inline uint32_t stops_child(const stop_set *set, uint32_t at, uint8_t byte)
{
    uint32_t child = set->node[at].child;
    while (child && set->node[child].byte != byte) child = set->node[child].next;
    return child;
}

static inline uint32_t stops_step(const stop_set *set, uint32_t at, uint8_t byte)
{
    for (;;) {
        if (at == 0 && !(set->begins[byte >> 3] >> (byte & 7) & 1)) return 0;
        uint32_t child = stops_child(set, at, byte);
        if (child || at == 0) return child;
        at = set->node[at].fail;
    }
}

#endif
