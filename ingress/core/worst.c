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

#include "states.h"

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
    for (uint32_t i = 0; i < p->cuts; i++) {
        if (p->cut_end[i] >= p->cells || p->cut_cell[i] >= p->cells)
            return 0;
    }
    for (uint32_t i = 0; i < p->finals; i++) {
        if (p->final_source[i] >= p->cells)
            return 0;
    }
    return 1;
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
    EACH(cell, f->active + (size_t)state * WORDS)
    {
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
    EACH(cell, f->active + (size_t)state * WORDS)
    {
        for (uint32_t t = f->first_trial[cell]; t < f->first_trial[cell + 1]; t++) {
            if (p->trial_before[t] >> last & p->trial_after[t] >> p->kinds & 1)
                cost += (double)(ways[cell] * p->trial_ways[t]) * (double)(p->trial_besides[t] + dearest_price(p, t));
        }
    }
    return cost;
}

/* Keep what a state's ways can cost until they all end. */
static void add_rest(finder *f, uint32_t state)
{
    const float *ways = f->ways + (size_t)state * f->p->cells;
    double rest = 0.0;
    if (!f->p->rest)
        return;
    EACH(cell, f->active + (size_t)state * WORDS)
    {
        rest += (double)ways[cell] * (double)f->p->rest[cell];
    }
    f->rest = rest > f->rest ? rest : f->rest;
}

/* Keep the text with which ways become too many: it ends with a kind read in a state. */
static void tell_how(const finder *f, uint32_t state, uint32_t kind, ofw_worst *worst)
{
    uint8_t *text = worst->text;
    uint32_t length = 0;
    for (; length < sizeof worst->text && state != NONE; state = f->keys[state].from) {
        text[length++] = (uint8_t)kind;
        kind = f->keys[state].last;
    }
    for (uint32_t i = 0; i < length / 2; i++) {
        uint8_t other = text[i];
        text[i] = text[length - 1 - i];
        text[length - 1 - i] = other;
    }
    worst->length = length;
}

/* Follow every text until no state grows any more. Returns OFW_OK or OFW_TOO_MUCH. */
static int explore(finder *f, ofw_worst *worst)
{
    const ofw_pattern *p = f->p;
    uint32_t head = 0, waiting = 0;
    int changed = 0;
    uint32_t state = take(f, p->kinds, 1, &changed);
    if (state == NONE)
        return OFW_TOO_MUCH;
    f->queue[waiting++] = (uint16_t)state;
    f->keys[state].waiting = 1;
    f->keys[state].from = NONE;
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
            if (read_kind(f, state, kind) < 0) {
                tell_how(f, state, kind, worst);
                return OFW_TOO_MUCH;
            }
            if (f->work > p->max_work)
                return OFW_TOO_MUCH;
            f->cost[(size_t)state * p->kinds + kind] = (float)(own + f->asked);
            for (int begins = 0; begins < 2; begins++) {
                /* More searches begin only if none of those before has matched; the last one may have. */
                if (begins ? !f->keys[state].begins || f->over || p->matches_nothing : p->rest != NULL)
                    continue;
                changed = 0;
                uint32_t known = f->count;
                uint32_t to = take(f, kind, begins, &changed);
                if (to == NONE) {
                    if (known < OFW_MAX_STATES)
                        tell_how(f, state, kind, worst);
                    return OFW_TOO_MUCH;
                }
                if (to == known)
                    f->keys[to].from = (uint16_t)state;
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
    f->active = malloc(states * WORDS * sizeof *f->active);
    f->certain = malloc(states * WORDS * sizeof *f->certain);
    f->keys = malloc(states * sizeof *f->keys);
    f->next = malloc(states * p->kinds * 2 * sizeof *f->next);
    f->value = malloc(states * 3 * sizeof *f->value);
    f->cost = calloc(states * p->kinds, sizeof *f->cost);
    if (!f->cost || !f->active || !f->ways || !f->certain || !f->keys || !f->next || !f->value)
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
    worst->length = 0;
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
    for (uint32_t cell = 1; cell < pattern->cells; cell++) {
        if (pattern->ends[cell])
            set(f->ending, cell);
    }
    int result = allocate(f);
    if (result == OFW_OK) {
        choose_telling(f);
        result = explore(f, worst);
    }
    worst->states = f->count;
    worst->work = f->work;
    if (result == OFW_OK)
        find_mean(f, worst);
    free(f->ways);
    free(f->active);
    free(f->certain);
    free(f->keys);
    free(f->next);
    free(f->value);
    free(f->cost);
    free(f);
    return result;
}
