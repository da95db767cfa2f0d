/* States: what all searches that were begun so far can be doing, and what reading a character makes of them. */

#include <string.h>

#include "states.h"

/* Which cells tell states apart: those that can be come to in `depth` characters. */
void choose_telling(finder *f)
{
    const ofw_pattern *p = f->p;
    uint16_t far[OFW_MAX_CELLS];
    uint32_t head = 0, tail = 0;
    memset(far, 0xff, sizeof far);
    far[0] = 0;
    f->queue[tail++] = 0;
    while (head < tail) {
        uint32_t cell = f->queue[head++];
        if (p->may[cell])
            set(f->telling, cell);
        if (far[cell] >= p->depth)
            continue;
        for (uint32_t j = 0; j < p->joins; j++) {
            uint32_t target = p->join_target[j];
            if (p->join_source[j] == cell && far[target] == 0xffff) {
                far[target] = far[cell];
                f->queue[tail++] = (uint16_t)target;
            }
        }
        for (uint32_t e = f->first_edge[cell]; e < f->first_edge[cell + 1]; e++) {
            uint32_t target = p->edge_target[e];
            if (far[target] == 0xffff) {
                far[target] = (uint16_t)(far[cell] + 1);
                f->queue[tail++] = (uint16_t)target;
            }
        }
    }
}

static uint64_t mixed(uint64_t hash, uint64_t value)
{
    return ((hash ^ value) * UINT64_C(0xff51afd7ed558ccd)) ^ (hash >> 29);
}

static uint32_t hash_of(const key *k, uint32_t words)
{
    uint64_t h = (k->alike * UINT64_C(0x9e3779b97f4a7c15) + k->begins) ^ k->many;
    for (uint32_t i = 0; i < words; i++)
        h = (h ^ k->used[i]) * UINT64_C(0xff51afd7ed558ccd), h ^= h >> 32;
    return (uint32_t)h & (SLOTS - 1);
}

/* Return the state of a key, made when it is new; NONE when there are too many. */
static uint32_t state_of(finder *f, const key *wanted, int *is_new)
{
    uint32_t words = (f->p->cells + 63) / 64;
    uint32_t slot = hash_of(wanted, words);
    *is_new = 0;
    while (f->slots[slot] != NONE) {
        key *k = &f->keys[f->slots[slot]];
        if (k->alike == wanted->alike && k->begins == wanted->begins && k->many == wanted->many &&
            memcmp(k->used, wanted->used, words * sizeof *k->used) == 0)
            return f->slots[slot];
        slot = (slot + 1) & (SLOTS - 1);
    }
    if (f->count >= OFW_MAX_STATES)
        return NONE;
    f->slots[slot] = (uint16_t)f->count;
    f->keys[f->count] = *wanted;
    *is_new = 1;
    return f->count++;
}

static void forget_step(finder *f)
{
    EACH(cell, f->step_active)
    {
        f->step_ways[cell] = 0.0f;
    }
    memset(f->step_active, 0, sizeof f->step_active);
    memset(f->step_certain, 0, sizeof f->step_certain);
    memset(f->step_matched, 0, sizeof f->step_matched);
}

/* Take away ways that were none. */
static void cut(finder *f)
{
    const ofw_pattern *p = f->p;
    for (uint32_t i = 0; i < p->cuts; i++) {
        uint32_t cell = p->cut_cell[i];
        if (!bit(f->step_matched, p->cut_end[i]) || f->step_ways[cell] <= p->cut_most[i])
            continue;
        f->step_ways[cell] = p->cut_most[i];
        if (p->cut_most[i] == 0.0f)
            f->step_active[cell / 64] &= ~(UINT64_C(1) << (cell % 64));
    }
    f->work += p->cuts / 4;
}

int read_kind(finder *f, uint32_t state, uint32_t kind)
{
    const ofw_pattern *p = f->p;
    const float *ways = f->ways + (size_t)state * p->cells;
    const uint64_t *certain = f->certain + (size_t)state * WORDS;
    uint32_t last = f->keys[state].last;
    double asked = 0.0, last_asked = 0.0;
    f->over = 0;
    forget_step(f);
    EACH(cell, f->active + (size_t)state * WORDS)
    {
        int surely = bit(certain, cell);
        double here = 0.0;
        for (uint32_t t = f->first_trial[cell]; t < f->first_trial[cell + 1]; t++) {
            if (p->trial_before[t] >> last & p->trial_after[t] >> kind & 1)
                here += (double)(ways[cell] * p->trial_ways[t]) *
                        (double)(p->trial_besides[t] + p->prices[p->trial_test[t] * p->kinds + kind]);
        }
        if (!on_the_last_way(p, cell))
            asked += here;
        else if (here > last_asked)
            last_asked = here;
        f->work += 2 + f->first_edge[cell + 1] - f->first_edge[cell] + f->first_trial[cell + 1] - f->first_trial[cell];
        for (uint32_t e = f->first_edge[cell]; e < f->first_edge[cell + 1]; e++) {
            uint32_t target = p->edge_target[e];
            if (!(p->may[target] >> kind & 1) || !(p->edge_after[e] >> kind & 1) || !(p->edge_before[e] >> last & 1))
                continue;
            int there = surely && p->edge_sharp[e] && (p->surely[target] >> kind & 1);
            set(f->step_active, target);
            if (p->ends[target]) {
                /* The one search that matches never comes back from here: it is here once at most. */
                if (there)
                    set(f->step_matched, target);
                f->over |= there;
                f->step_ways[target] = 1.0f;
                continue;
            }
            if (there)
                set(f->step_certain, target);
            f->step_ways[target] += ways[cell] * p->edge_ways[e];
            if (f->step_ways[target] > MAX_WAYS)
                return -1;
        }
    }
    if (f->over)
        cut(f);
    for (uint32_t i = 0; i < p->finals; i++)
        f->over |= bit(certain, p->final_source[i]) && (p->final_before[i] >> last & p->final_after[i] >> kind & 1);
    f->asked = asked + last_asked;
    return 0;
}

/* Join the ways that come to each hub. Returns -1 when they have become too many. */
static int join(finder *f, uint32_t kind)
{
    const ofw_pattern *p = f->p;
    for (uint32_t j = 0; j < p->joins; j++) {
        uint32_t hub = p->join_target[j], source = p->join_source[j];
        if (j == 0 || p->join_target[j - 1] != hub) {
            f->step_ways[hub] = 0.0f;
            f->step_active[hub / 64] &= ~(UINT64_C(1) << (hub % 64));
            f->step_certain[hub / 64] &= ~(UINT64_C(1) << (hub % 64));
        }
        if (f->step_ways[source] == 0.0f || !(p->join_before[j] >> kind & 1))
            continue;
        set(f->step_active, hub);
        f->step_ways[hub] += f->step_ways[source] * p->join_ways[j];
        if (f->step_ways[hub] > MAX_WAYS)
            return -1;
        if (p->join_sharp[j] && bit(f->step_certain, source))
            set(f->step_certain, hub);
    }
    f->work += p->joins / 2;
    return 0;
}

/* Return a number that is the same for counts that are much the same: the exponent and some bits after it. */
static uint64_t roughly(const ofw_pattern *p, float ways)
{
    uint32_t bits;
    memcpy(&bits, &ways, sizeof bits);
    return p->digits ? bits >> (24 - p->digits) : 0;
}

uint32_t take(finder *f, uint32_t kind, int begins, int *changed)
{
    const ofw_pattern *p = f->p;
    key wanted;
    memset(&wanted, 0, sizeof wanted);
    wanted.alike = p->alike[kind];
    wanted.last = (uint8_t)kind;
    wanted.begins = (uint8_t)begins;
    f->step_ways[0] = begins ? 1.0f : 0.0f;
    if (begins) {
        set(f->step_active, 0);
        set(f->step_certain, 0);
        /* Another search begins: none before has matched. */
        EACH(cell, f->step_active)
        {
            if (bit(f->ending, cell))
                f->step_ways[cell] = 0.0f;
        }
        for (uint32_t word = 0; word < WORDS; word++)
            f->step_active[word] &= ~f->ending[word];
    } else {
        f->step_active[0] &= ~UINT64_C(1);
        f->step_certain[0] &= ~UINT64_C(1);
    }
    if (join(f, kind) < 0)
        return NONE;
    EACH(cell, f->step_active)
    {
        if (bit(f->telling, cell)) {
            set(wanted.used, cell);
            wanted.many = mixed(wanted.many, roughly(p, f->step_ways[cell]));
        }
        f->work += 3;
    }
    f->work += 10;
    int is_new;
    uint32_t state = state_of(f, &wanted, &is_new);
    if (state == NONE)
        return NONE;
    float *ways = f->ways + (size_t)state * p->cells;
    uint64_t *certain = f->certain + (size_t)state * WORDS, *active = f->active + (size_t)state * WORDS;
    if (is_new) {
        memset(ways, 0, p->cells * sizeof *ways);
        memset(active, 0, WORDS * sizeof *active);
        memcpy(certain, f->step_certain, WORDS * sizeof *certain);
    }
    EACH(cell, f->step_active)
    {
        if (f->step_ways[cell] > ways[cell]) {
            ways[cell] = f->step_ways[cell];
            set(active, cell);
            *changed = 1;
        }
    }
    if (is_new) {
        *changed = 1;
        return state;
    }
    for (uint32_t i = 0; i < WORDS; i++) {
        uint64_t both = certain[i] & f->step_certain[i];
        if (both != certain[i]) {
            certain[i] = both;
            *changed = 1;
        }
    }
    return state;
}
