/* Random patterns for the search for the worst text, some of them nonsense: for the sanitizers.
 *
 *   fuzz SEED ROUNDS     prints what was found; a pattern that points outside must be refused
 *
 * Built with -DSCARCE (tests/scarce.h) memory runs out now and then: that is said, and nothing is left.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "api.h"
#ifdef SCARCE
#include "scarce.h"
#define SCARCITY below(40)
#else
static uint32_t scarce;
#define SCARCITY 0
#endif

static uint64_t state;

static uint32_t below(uint32_t limit)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (uint32_t)((state >> 11) % limit);
}

enum { CELLS = 40, EDGES = 120, JOINS = 20, TRIALS = 60, TESTS = 6, KINDS = 9, FINALS = 5, CUTS = 8 };

typedef struct {
    uint64_t may[CELLS], surely[CELLS], edge_before[EDGES], edge_after[EDGES], join_before[JOINS];
    uint64_t trial_before[TRIALS], trial_after[TRIALS], final_before[FINALS], final_after[FINALS];
    float cost[CELLS], edge_ways[EDGES], join_ways[JOINS], trial_ways[TRIALS], trial_besides[TRIALS];
    float prices[TESTS * KINDS], rest[CELLS], cut_most[CUTS];
    uint16_t edge_source[EDGES], edge_target[EDGES], join_source[JOINS], join_target[JOINS];
    uint16_t trial_cell[TRIALS], trial_test[TRIALS], final_source[FINALS], cut_end[CUTS], cut_cell[CUTS];
    uint8_t ends[CELLS], edge_sharp[EDGES], join_sharp[JOINS], alike[KINDS + 1];
} room;

static uint64_t some(uint32_t kinds) { return below(4) ? below(1u << (kinds + 1)) : (1u << (kinds + 1)) - 1; }

static uint16_t place(uint32_t cells, int wild) { return (uint16_t)(wild && !below(200) ? below(70000) : below(cells)); }

static int ascending(const void *a, const void *b)
{
    return (int)*(const uint16_t *)a - (int)*(const uint16_t *)b;
}

/* Fill a pattern whose arrays are exactly as long as it says, so that a step beyond one is seen. */
static void fill(ofw_pattern *p, room *r, int wild)
{
    uint32_t cells = 1 + below(CELLS), hubs = below(4) < 3 ? below(1 + cells / 4) : 0;
    memset(p, 0, sizeof *p);
    p->cells = cells;
    p->kinds = 1 + below(KINDS);
    p->edges = below(EDGES);
    p->joins = hubs ? below(JOINS) : 0;
    p->trials = below(TRIALS);
    p->tests = 1 + below(TESTS);
    for (uint32_t i = 0; i < cells; i++) {
        int hub = i && i >= cells - hubs;
        r->may[i] = hub ? 0 : 1 | some(p->kinds);
        r->surely[i] = r->may[i] & some(p->kinds);
        r->cost[i] = (float)below(30);
        r->rest[i] = (float)below(900);
        r->ends[i] = !hub && !below(9);
    }
    for (uint32_t i = 0; i < p->edges; i++) r->edge_source[i] = place(cells, wild);
    qsort(r->edge_source, p->edges, sizeof *r->edge_source, ascending);
    for (uint32_t i = 0; i < p->edges; i++) {
        r->edge_target[i] = place(cells, wild);
        r->edge_ways[i] = (float)(1 + below(2));
        r->edge_before[i] = some(p->kinds);
        r->edge_after[i] = some(p->kinds);
        r->edge_sharp[i] = (uint8_t)below(2);
    }
    for (uint32_t i = 0; i < p->joins; i++) {
        r->join_source[i] = place(cells, wild);
        r->join_target[i] = (uint16_t)(wild && !below(50) ? below(cells) : cells - 1 - i * hubs / p->joins);
        r->join_ways[i] = 1.0f;
        r->join_before[i] = some(p->kinds);
        r->join_sharp[i] = (uint8_t)below(2);
    }
    for (uint32_t i = 0; i < p->trials; i++) r->trial_cell[i] = place(cells, wild);
    qsort(r->trial_cell, p->trials, sizeof *r->trial_cell, ascending);
    for (uint32_t i = 0; i < p->trials; i++) {
        r->trial_ways[i] = 1.0f;
        r->trial_before[i] = some(p->kinds);
        r->trial_after[i] = some(p->kinds);
        r->trial_besides[i] = (float)below(9);
        r->trial_test[i] = (uint16_t)(wild && !below(300) ? below(99) : below(p->tests));
    }
    p->finals = below(FINALS);
    for (uint32_t i = 0; i < p->finals; i++) {
        r->final_source[i] = place(cells, wild);
        r->final_before[i] = some(p->kinds);
        r->final_after[i] = some(p->kinds);
    }
    p->cuts = below(CUTS);
    for (uint32_t i = 0; i < p->cuts; i++) {
        r->cut_end[i] = place(cells, wild);
        r->cut_cell[i] = place(cells, wild);
        r->cut_most[i] = (float)below(2);
    }
    for (uint32_t i = 0; i < p->tests * p->kinds; i++) r->prices[i] = (float)below(25);
    for (uint32_t i = 0; i <= p->kinds; i++) r->alike[i] = (uint8_t)below(3);
    p->matches_nothing = !below(5);
    p->depth = below(3) ? 1u << 16 : below(6);
    p->digits = below(4);
    p->max_work = 200000;
}

/* Give the pattern copies of its columns with not a byte more. */
#define GIVE(field, count)                                                     \
    do {                                                                       \
        size_t size = sizeof *r->field * (size_t)(count);                      \
        void *copy = malloc(size ? size : 1);                                  \
        if (!copy) return 2;                                                   \
        memcpy(copy, r->field, size);                                          \
        p.field = copy;                                                        \
        copies[n++] = copy;                                                    \
    } while (0)

static int once(room *r, int wild, unsigned *found, unsigned *refused, unsigned *without)
{
    ofw_pattern p;
    ofw_worst worst;
    void *copies[32];
    int n = 0;
    fill(&p, r, wild);
    GIVE(may, p.cells);
    GIVE(surely, p.cells);
    GIVE(cost, p.cells);
    GIVE(ends, p.cells);
    if (below(2)) GIVE(rest, p.cells);
    GIVE(cut_end, p.cuts);
    GIVE(cut_cell, p.cuts);
    GIVE(cut_most, p.cuts);
    GIVE(final_source, p.finals);
    GIVE(final_before, p.finals);
    GIVE(final_after, p.finals);
    GIVE(edge_source, p.edges);
    GIVE(edge_target, p.edges);
    GIVE(edge_ways, p.edges);
    GIVE(edge_before, p.edges);
    GIVE(edge_after, p.edges);
    GIVE(edge_sharp, p.edges);
    GIVE(join_source, p.joins);
    GIVE(join_target, p.joins);
    GIVE(join_ways, p.joins);
    GIVE(join_before, p.joins);
    GIVE(join_sharp, p.joins);
    GIVE(trial_cell, p.trials);
    GIVE(trial_ways, p.trials);
    GIVE(trial_before, p.trials);
    GIVE(trial_after, p.trials);
    GIVE(trial_besides, p.trials);
    GIVE(trial_test, p.trials);
    GIVE(prices, p.tests * p.kinds);
    GIVE(alike, p.kinds + 1);
    memset(&worst, 0, sizeof worst);
    scarce = SCARCITY;
    int result = ofw_find(&p, &worst);
    int ran_out = scarce && result == OFW_NO_MEMORY;
    scarce = 0;
    while (n) free(copies[--n]);
    *found += result == OFW_OK;
    *refused += result == OFW_BAD_INPUT;
    *without += (unsigned)ran_out;
    if (result == OFW_OK) {
        for (uint32_t i = 0; i < worst.length; i++)
            if (worst.text[i] >= p.kinds) return 1;
        if (!(worst.each >= 0.0) || !(worst.first >= 0.0)) return 1;
    }
    return result != OFW_OK && result != OFW_TOO_MUCH && !ran_out && !(wild && result == OFW_BAD_INPUT);
}

int main(int argc, char **argv)
{
    static room r;
    unsigned found = 0, refused = 0, without = 0;
    if (argc != 3) return 2;
    state = strtoull(argv[1], NULL, 10) * 2654435761u + 88172645463325252u;
    unsigned rounds = (unsigned)strtoul(argv[2], NULL, 10);
    for (unsigned i = 0; i < rounds; i++) {
        int bad = once(&r, i % 3 == 0, &found, &refused, &without);
        if (bad) {
            fprintf(stderr, "round %u of seed %s: wrong answer\n", i, argv[1]);
            return bad;
        }
    }
    printf("found %u refused %u without memory %u of %u\n", found, refused, without, rounds);
    return found > rounds / 10 && refused > rounds / 100 ? 0 : 3;
}
