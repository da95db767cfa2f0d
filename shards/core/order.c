/* Several steps' rows, joined end to end, in the order that brings each request's next to each other. */
#include "shard.h"

#include <stdlib.h>
#include <string.h>

/* Per row: its first token; the request's next row. Per request (group): its first and last row. Then the table,
 * at least twice the rows, that finds a route's group. */
typedef struct {
    uint32_t *token, *next, *first, *last, *table;
    uint32_t groups, mask;
    uint64_t key;
    int shift;
} grouping;

enum { ARRAYS = 4, NONE = UINT32_MAX };

static uint64_t route_at(const ofs_rows *step, uint32_t row)
{
    uint64_t route;
    memcpy(&route, (const uint8_t *)step->routes + 8 * (size_t)row, 8);
    return route;
}

static bool grouping_room(struct ofs_shard *shard, uint32_t rows, grouping *g)
{
    uint32_t slots = 64;
    int bits = 6;
    for (; slots < 2 * (uint64_t)rows; bits++) slots *= 2;
    size_t need = ARRAYS * (size_t)rows + slots;
    if (shard->order_cap < rows) {
        row_place *order = realloc(shard->order, sizeof *order * (size_t)rows);
        if (order) shard->order = order;
        uint32_t *groups = realloc(shard->groups, sizeof *groups * need);
        if (groups) shard->groups = groups;
        if (!order || !groups) return false;
        shard->order_cap = rows;
    }
    uint32_t *at = shard->groups;
    *g = (grouping){at, at + rows, at + 2 * (size_t)rows, at + 3 * (size_t)rows, at + ARRAYS * (size_t)rows, 0,
                    slots - 1, shard->order_key, 64 - bits};
    memset(g->table, 0xFF, sizeof *g->table * slots);
    return true;
}

/* Put a row behind the others of its request. The upper bits of a product with an odd number that was drawn by chance:
 * whatever routes a frame names, few of them share a place. */
static void grouping_add(grouping *g, const ofs_rows *step, uint32_t row)
{
    uint64_t route = route_at(step, row);
    uint32_t at = (uint32_t)(route * g->key >> g->shift);
    g->next[row] = NONE;
    for (; g->table[at] != NONE; at = (at + 1) & g->mask) {
        uint32_t group = g->table[at];
        if (route_at(step, g->first[group]) == route) {
            g->next[g->last[group]] = row;
            g->last[group] = row;
            return;
        }
    }
    g->table[at] = g->groups;
    g->first[g->groups] = g->last[g->groups] = row;
    g->groups++;
}

int order_rows(struct ofs_shard *shard, const ofs_rows *step)
{
    grouping g;
    if (step->rows == 0) return OFS_OK;
    if (!grouping_room(shard, step->rows, &g)) return OFS_NO_MEMORY;
    uint32_t token = 0, n = 0;
    for (uint32_t row = 0; row < step->rows; row++) {
        uint32_t count;
        memcpy(&count, (const uint8_t *)step->counts + 4 * (size_t)row, 4);
        if (count > step->tokens - token) return OFS_BAD_ROW;
        g.token[row] = token;
        token += count;
        grouping_add(&g, step, row);
    }
    for (uint32_t group = 0; group < g.groups; group++)
        for (uint32_t row = g.first[group]; row != NONE; row = g.next[row])
            shard->order[n++] = (row_place){row, g.token[row]};
    return OFS_OK;
}
