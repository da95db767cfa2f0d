/* The worst text for a pattern: what a search costs for each of its characters, at most, on average.
 *
 * A state is what all searches that were begun so far can be doing: for each cell the number of ways to be
 * there. Texts lead from state to state. States with the same cells in use are taken together, with the most
 * ways of any, so that there are finitely many; then the mean cost of the worst way round is bounded by value
 * iteration. Everything is from above: more ways, never fewer.
 */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "api.h"

#define WORDS (OFW_MAX_CELLS / 64)
#define SLOTS 4096 /* of the hash table: a power of two, twice the states */
#define NONE UINT16_MAX
#define MAX_WAYS 128.0f
#define ROUNDS 96

typedef struct {
    uint64_t used[WORDS]; /* cells that ways are at, as far as they tell states apart */
    uint64_t many;        /* how many ways are at them, roughly: a hash, states that share it are taken together */
    uint8_t alike;        /* what the kind that was read last is alike to */
    uint8_t begins;       /* a search begins at this place */
    uint8_t last;         /* such a kind */
    uint8_t waiting;      /* to be gone on from, again */
} key;

typedef struct {
    const ofw_pattern *p;
    uint32_t work;
    uint32_t count;
    uint32_t first_edge[OFW_MAX_CELLS + 1], first_trial[OFW_MAX_CELLS + 1];
    uint64_t telling[WORDS]; /* the cells that tell states apart */
    float *ways;             /* [state][cell] */
    uint64_t *certain;       /* [state][word] */
    key *keys;
    uint16_t *next;          /* [state][2 * kind + begins] */
    float *cost;             /* [state][kind]: of being there, and of what is asked when the kind comes next */
    double *value;           /* [3][state] */
    double rest;  /* the most that what is under way can cost in all, where ways do not come round */
    double end;   /* the most that the end of a text costs */
    double asked; /* what reading a kind cost */
    int over;     /* with that kind, a search that was begun earlier has matched */
    uint16_t slots[SLOTS];
    float step_ways[OFW_MAX_CELLS];
    uint64_t step_certain[WORDS];
    uint16_t queue[OFW_MAX_STATES];
} finder;

static int bit(const uint64_t *words, uint32_t index) { return (int)(words[index / 64] >> (index % 64) & 1); }

static void set(uint64_t *words, uint32_t index) { words[index / 64] |= UINT64_C(1) << (index % 64); }

static int valid(const ofw_pattern *p)
{
    if (p->cells == 0 || p->cells > OFW_MAX_CELLS || p->kinds == 0 || p->kinds > OFW_MAX_KINDS || p->tests == 0)
        return 0;
    for (uint32_t i = 0; i < p->edges; i++) {
        if (p->edge_source[i] >= p->cells || p->edge_target[i] >= p->cells || (i && p->edge_source[i] < p->edge_source[i - 1]))
            return 0;
    }
    for (uint32_t i = 0; i < p->trials; i++) {
        if (p->trial_cell[i] >= p->cells || p->trial_test[i] >= p->tests)
            return 0;
        if (i && p->trial_cell[i] < p->trial_cell[i - 1])
            return 0;
    }
    for (uint32_t i = 0; i < p->joins; i++) {
        if (p->join_source[i] >= p->cells || p->join_target[i] >= p->cells || p->may[p->join_target[i]])
            return 0;
    }
    for (uint32_t i = 0; i < p->finals; i++) {
        if (p->final_source[i] >= p->cells)
            return 0;
    }
    return 1;
}

/* Which cells tell states apart: those that can be come to in `depth` characters. */
static void choose_telling(finder *f)
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

/* Of the cells at which a search has matched only one is come to, by one way: nothing is left again. */
static int on_the_last_way(const ofw_pattern *p, uint32_t cell) { return p->ends[cell] && p->may[cell]; }

/* Fill step_ways and step_certain with what reading a kind makes of a state. Returns -1 when ways have become
 * too many. */
static int read_kind(finder *f, uint32_t state, uint32_t kind)
{
    const ofw_pattern *p = f->p;
    const float *ways = f->ways + (size_t)state * p->cells;
    const uint64_t *certain = f->certain + (size_t)state * WORDS;
    uint32_t last = f->keys[state].last;
    uint32_t words = (p->cells + 63) / 64;
    double asked = 0.0, last_asked = 0.0;
    f->over = 0;
    memset(f->step_ways, 0, p->cells * sizeof *f->step_ways);
    memset(f->step_certain, 0, words * sizeof *f->step_certain);
    for (uint32_t cell = 0; cell < p->cells; cell++) {
        if (ways[cell] == 0.0f)
            continue;
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
        f->work += 2 + f->first_edge[cell + 1] - f->first_edge[cell];
        for (uint32_t e = f->first_edge[cell]; e < f->first_edge[cell + 1]; e++) {
            uint32_t target = p->edge_target[e];
            if (!(p->may[target] >> kind & 1) || !(p->edge_after[e] >> kind & 1) || !(p->edge_before[e] >> last & 1))
                continue;
            int there = surely && p->edge_sharp[e] && (p->surely[target] >> kind & 1);
            if (p->ends[target]) {
                /* The one search that matches never comes back from here: it is here once at most. */
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
            f->step_certain[hub / 64] &= ~(UINT64_C(1) << (hub % 64));
        }
        if (f->step_ways[source] == 0.0f || !(p->join_before[j] >> kind & 1))
            continue;
        f->step_ways[hub] += f->step_ways[source] * p->join_ways[j];
        if (f->step_ways[hub] > MAX_WAYS)
            return -1;
        if (p->join_sharp[j] && bit(f->step_certain, source))
            set(f->step_certain, hub);
    }
    f->work += p->joins;
    return 0;
}

/* Return a number that is the same for counts that are much the same: the exponent and some bits after it. */
static uint64_t roughly(const ofw_pattern *p, float ways)
{
    uint32_t bits;
    memcpy(&bits, &ways, sizeof bits);
    return p->digits ? bits >> (24 - p->digits) : 0;
}

/* Take what was read into the state it belongs to. Returns the state, or NONE; `changed` when it grew. */
static uint32_t take(finder *f, uint32_t kind, int begins, int *changed)
{
    const ofw_pattern *p = f->p;
    uint32_t words = (p->cells + 63) / 64;
    key wanted;
    memset(&wanted, 0, sizeof wanted);
    wanted.alike = p->alike[kind];
    wanted.last = (uint8_t)kind;
    wanted.begins = (uint8_t)begins;
    f->step_ways[0] = begins ? 1.0f : 0.0f;
    if (begins)
        set(f->step_certain, 0);
    else
        f->step_certain[0] &= ~UINT64_C(1);
    for (uint32_t cell = 1; begins && cell < p->cells; cell++) {
        if (p->ends[cell])
            f->step_ways[cell] = 0.0f; /* Another search begins: none before has matched. */
    }
    if (join(f, kind) < 0)
        return NONE;
    for (uint32_t cell = 0; cell < p->cells; cell++) {
        if (f->step_ways[cell] != 0.0f && bit(f->telling, cell)) {
            set(wanted.used, cell);
            wanted.many = mixed(wanted.many, roughly(p, f->step_ways[cell]));
        }
    }
    f->work += p->cells / 2;
    int is_new;
    uint32_t state = state_of(f, &wanted, &is_new);
    if (state == NONE)
        return NONE;
    float *ways = f->ways + (size_t)state * p->cells;
    uint64_t *certain = f->certain + (size_t)state * WORDS;
    if (is_new) {
        memcpy(ways, f->step_ways, p->cells * sizeof *ways);
        memcpy(certain, f->step_certain, words * sizeof *certain);
        *changed = 1;
        return state;
    }
    for (uint32_t cell = 0; cell < p->cells; cell++) {
        if (f->step_ways[cell] > ways[cell]) {
            ways[cell] = f->step_ways[cell];
            *changed = 1;
        }
    }
    for (uint32_t i = 0; i < words; i++) {
        uint64_t both = certain[i] & f->step_certain[i];
        if (both != certain[i]) {
            certain[i] = both;
            *changed = 1;
        }
    }
    return state;
}

/* What a trial's test costs at most. */
static float dearest_price(const ofw_pattern *p, uint32_t trial)
{
    const float *prices = p->prices + (size_t)p->trial_test[trial] * p->kinds;
    float most = 0.0f;
    for (uint32_t kind = 0; kind < p->kinds; kind++)
        most = prices[kind] > most ? prices[kind] : most;
    return most;
}

/* What being in a state costs. */
static double cost_of(const finder *f, uint32_t state)
{
    const ofw_pattern *p = f->p;
    const float *ways = f->ways + (size_t)state * p->cells;
    double cost = 0.0, last = 0.0;
    for (uint32_t cell = 0; cell < p->cells; cell++) {
        double here = (double)ways[cell] * (double)p->cost[cell];
        if (!on_the_last_way(p, cell))
            cost += here;
        else if (here > last)
            last = here;
    }
    return cost + last;
}

/* What is asked in a state where the text ends, or before its last newline. */
static double cost_of_the_end(finder *f, uint32_t state)
{
    const ofw_pattern *p = f->p;
    const float *ways = f->ways + (size_t)state * p->cells;
    uint32_t last = f->keys[state].last;
    double cost = cost_of(f, state);
    for (uint32_t t = 0; t < p->trials; t++) {
        if (p->trial_before[t] >> last & p->trial_after[t] >> p->kinds & 1)
            cost += (double)(ways[p->trial_cell[t]] * p->trial_ways[t]) * (double)(p->trial_besides[t] + dearest_price(p, t));
    }
    f->work += p->trials / 2;
    return cost;
}

/* Keep what a state's ways can cost until they all end. */
static void add_rest(finder *f, uint32_t state)
{
    const float *ways = f->ways + (size_t)state * f->p->cells;
    double rest = 0.0;
    for (uint32_t cell = 0; f->p->rest && cell < f->p->cells; cell++)
        rest += (double)ways[cell] * (double)f->p->rest[cell];
    f->rest = rest > f->rest ? rest : f->rest;
}

/* Follow every text until no state grows any more. Returns OFW_OK or OFW_TOO_MUCH. */
static int explore(finder *f)
{
    const ofw_pattern *p = f->p;
    uint32_t head = 0, waiting = 0;
    int changed = 0;
    f->step_ways[0] = 1.0f;
    uint32_t state = take(f, p->kinds, 1, &changed);
    if (state == NONE)
        return OFW_TOO_MUCH;
    f->queue[waiting++] = (uint16_t)state;
    f->keys[state].waiting = 1;
    while (waiting) {
        state = f->queue[head];
        head = (head + 1) % OFW_MAX_STATES;
        waiting--;
        f->keys[state].waiting = 0;
        double own = cost_of(f, state), end = cost_of_the_end(f, state);
        f->end = end > f->end ? end : f->end;
        add_rest(f, state);
        for (uint32_t kind = 0; kind < p->kinds; kind++) {
            uint16_t *next = f->next + ((size_t)state * p->kinds + kind) * 2;
            if (read_kind(f, state, kind) < 0 || f->work > p->max_work)
                return OFW_TOO_MUCH;
            f->cost[(size_t)state * p->kinds + kind] = (float)(own + f->asked);
            for (int begins = 0; begins < 2; begins++) {
                /* More searches begin only if none of those before has matched; the last one may have. */
                if (begins ? !f->keys[state].begins || f->over || p->matches_nothing : p->rest != NULL)
                    continue;
                changed = 0;
                uint32_t to = take(f, kind, begins, &changed);
                if (to == NONE)
                    return OFW_TOO_MUCH;
                next[begins] = (uint16_t)to;
                if (changed && !f->keys[to].waiting) {
                    f->keys[to].waiting = 1;
                    f->queue[(head + waiting) % OFW_MAX_STATES] = (uint16_t)to;
                    waiting++;
                }
            }
        }
    }
    return OFW_OK;
}

/* Return the most a text can cost from each state on, one character longer than `from`. */
static void value_step(finder *f, const double *from, double *to)
{
    uint32_t kinds = f->p->kinds;
    for (uint32_t state = 0; state < f->count; state++) {
        const uint16_t *next = f->next + (size_t)state * kinds * 2;
        const float *cost = f->cost + (size_t)state * kinds;
        double most = 0.0;
        for (uint32_t i = 0; i < kinds * 2; i++) {
            if (next[i] != NONE && from[next[i]] + (double)cost[i / 2] > most)
                most = from[next[i]] + (double)cost[i / 2];
        }
        to[state] = most;
    }
}

/* The mean of the worst way round, from above: if h(s) + each >= cost(s) + h(next) for every state and what can
 * come next, n characters cost at most h + n * each. Here h is the mean of the values of several rounds. */
static void find_mean(finder *f, ofw_worst *worst)
{
    double *from = f->value, *to = from + f->count, *middle = to + f->count;
    for (uint32_t state = 0; state < f->count; state++)
        from[state] = 0.0;
    for (uint32_t round = 0; round < ROUNDS; round++) {
        if (round == ROUNDS / 2)
            memcpy(middle, from, f->count * sizeof *from);
        value_step(f, from, to);
        double *swap = from;
        from = to;
        to = swap;
    }
    worst->each = worst->first = 0.0;
    for (uint32_t state = 0; state < f->count; state++) {
        double mean = (from[state] - middle[state]) / (ROUNDS - ROUNDS / 2);
        if (mean > worst->each)
            worst->each = mean;
        if (from[state] > worst->first)
            worst->first = from[state];
    }
    /* The text ends, perhaps after a newline before which it might have ended: two places that are not counted. */
    worst->first += 2.0 * f->end + f->rest;
    uint32_t state = 0;
    for (worst->length = 0; worst->length < sizeof worst->text; worst->length++) {
        const uint16_t *next = f->next + (size_t)state * f->p->kinds * 2;
        uint32_t best = NONE, taken = 0;
        double most = -1.0;
        for (uint32_t i = 0; i < f->p->kinds * 2; i++) {
            double value = next[i] == NONE ? -1.0 : to[next[i]] + (double)f->cost[(size_t)state * f->p->kinds + i / 2];
            if (value > most)
                most = value, best = next[i], taken = i / 2;
        }
        if (best == NONE)
            break;
        worst->text[worst->length] = (uint8_t)taken;
        state = best;
    }
}

static int allocate(finder *f)
{
    const ofw_pattern *p = f->p;
    size_t states = OFW_MAX_STATES;
    f->ways = malloc(states * p->cells * sizeof *f->ways);
    f->certain = malloc(states * WORDS * sizeof *f->certain);
    f->keys = malloc(states * sizeof *f->keys);
    f->next = malloc(states * p->kinds * 2 * sizeof *f->next);
    f->value = malloc(states * 3 * sizeof *f->value);
    f->cost = calloc(states * p->kinds, sizeof *f->cost);
    if (!f->cost || !f->ways || !f->certain || !f->keys || !f->next || !f->value)
        return OFW_NO_MEMORY;
    memset(f->next, 0xff, states * p->kinds * 2 * sizeof *f->next);
    memset(f->slots, 0xff, sizeof f->slots);
    return OFW_OK;
}

int ofw_find(const ofw_pattern *pattern, ofw_worst *worst)
{
    if (!valid(pattern))
        return OFW_BAD_INPUT;
    finder *f = calloc(1, sizeof *f);
    if (!f)
        return OFW_NO_MEMORY;
    f->p = pattern;
    for (uint32_t cell = 0, e = 0; cell <= pattern->cells; cell++) {
        while (e < pattern->edges && pattern->edge_source[e] < cell)
            e++;
        f->first_edge[cell] = e;
    }
    for (uint32_t cell = 0, t = 0; cell <= pattern->cells; cell++) {
        while (t < pattern->trials && pattern->trial_cell[t] < cell)
            t++;
        f->first_trial[cell] = t;
    }
    int result = allocate(f);
    if (result == OFW_OK) {
        choose_telling(f);
        result = explore(f);
    }
    worst->states = f->count;
    worst->work = f->work;
    if (result == OFW_OK)
        find_mean(f, worst);
    free(f->ways);
    free(f->certain);
    free(f->keys);
    free(f->next);
    free(f->value);
    free(f->cost);
    free(f);
    return result;
}
