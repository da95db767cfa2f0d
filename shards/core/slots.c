#include "slots.h"

#include <stdlib.h>
#include <string.h>

static void clear(slot *s)
{
    if (s->extra) {
        stops_free(s->extra->stops);
        free(s->extra->held);
        free(s->extra);
    }
    memset(s, 0, sizeof *s);
}

slot *slots_take(slot_table *t, uint64_t route)
{
    slot_page ***pages = &t->readers[route_reader(route)];
    if (!*pages && !(*pages = calloc(READER_PAGES, sizeof **pages))) return NULL;
    slot_page **page = &(*pages)[route_slot(route) >> PAGE_BITS];
    if (!*page) {
        if (t->pages >= MAX_PAGES || !(*page = calloc(1, sizeof **page))) return NULL;
        t->pages++;
    }
    slot *s = &(*page)->slots[route_slot(route) & (PAGE_SLOTS - 1)];
    if (!s->route) {
        (*page)->live++;
        t->live++;
    }
    clear(s);
    s->route = route;
    return s;
}

bool slots_drop(slot_table *t, uint64_t route)
{
    slot *s = slots_find(t, route);
    if (!s) return false;
    slot_page **page = &t->readers[route_reader(route)][route_slot(route) >> PAGE_BITS];
    clear(s);
    t->live--;
    if (--(*page)->live == 0) {
        free(*page);
        *page = NULL;
        t->pages--;
    }
    return true;
}

void slots_free(slot_table *t)
{
    for (uint32_t reader = 0; reader < READERS; reader++) {
        slot_page **pages = t->readers[reader];
        for (uint32_t i = 0; pages && i < READER_PAGES; i++) {
            for (uint32_t k = 0; pages[i] && k < PAGE_SLOTS; k++) clear(&pages[i]->slots[k]);
            free(pages[i]);
        }
        free(pages);
        t->readers[reader] = NULL;
    }
    t->live = t->pages = 0;
}

slot_extra *slot_need_extra(slot *s)
{
    if (!s->extra) s->extra = calloc(1, sizeof *s->extra);
    return s->extra;
}
