#include "stops.h"

#include <stdlib.h>
#include <string.h>

static bool insert(stop_set *set, const uint8_t *bytes, uint32_t len, uint32_t pattern)
{
    uint32_t at = 0;
    for (uint32_t i = 0; i < len; i++) {
        uint32_t child = stops_child(set, at, bytes[i]);
        if (!child) {
            child = set->nodes++;
            set->node[child] = (stop_node){.next = set->node[at].child, .match = STOPS_NONE, .byte = bytes[i]};
            set->node[at].child = child;
        }
        at = child;
    }
    if (at && set->node[at].match == STOPS_NONE) set->node[at].match = pattern;
    return at != 0;
}

/* Breadth first, so that a node's fail link, which is shorter, is complete before it. `depth` and `queue` have
 * one entry per node. */
static void link_nodes(stop_set *set, uint32_t *depth, uint32_t *queue)
{
    uint32_t head = 0, tail = 0;
    depth[0] = 0;
    queue[tail++] = 0;
    while (head < tail) {
        uint32_t at = queue[head++];
        stop_node *node = &set->node[at];
        /* Text that is a whole stop string and a beginning of none can become no other by growing. */
        node->hold = node->child ? depth[at] : (at ? set->node[node->fail].hold : 0);
        if (at && node->match == STOPS_NONE) node->match = set->node[node->fail].match;
        for (uint32_t child = node->child; child; child = set->node[child].next) {
            set->node[child].fail = at ? stops_step(set, node->fail, set->node[child].byte) : 0;
            depth[child] = depth[at] + 1;
            queue[tail++] = child;
        }
    }
}

stop_set *stops_new(const uint8_t *bytes, const uint32_t *lens, uint32_t count)
{
    size_t total = 1;
    for (uint32_t i = 0; i < count; i++) total += lens[i];
    stop_set *set = calloc(1, sizeof *set + total * sizeof(stop_node));
    uint32_t *scratch = malloc(2 * total * sizeof *scratch);
    uint32_t *lengths = malloc((count ? count : 1) * sizeof *lengths);
    if (!set || !scratch || !lengths) {
        free(set);
        free(scratch);
        free(lengths);
        return NULL;
    }
    set->lens = lengths;
    set->nodes = 1;
    set->node[0].match = STOPS_NONE;
    for (uint32_t i = 0; i < count; i++) {
        lengths[i] = lens[i];
        if (insert(set, bytes, lens[i], i)) set->begins[bytes[0] >> 3] |= (uint8_t)(1u << (bytes[0] & 7));
        bytes += lens[i];
    }
    link_nodes(set, scratch, scratch + total);
    free(scratch);
    return set;
}

void stops_free(stop_set *set)
{
    if (!set) return;
    free(set->lens);
    free(set);
}
