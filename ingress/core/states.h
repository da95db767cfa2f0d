/* What the C files share and Python never sees: the states that texts lead to, and what reading a character
 * makes of one. */

#ifndef OUTFEED_INGRESS_STATES_H
#define OUTFEED_INGRESS_STATES_H

#include <stdint.h>

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
    uint16_t from;        /* the state it was first come to from */
} key;

typedef struct {
    const ofw_pattern *p;
    uint32_t work;
    uint32_t count;
    uint32_t first_edge[OFW_MAX_CELLS + 1], first_trial[OFW_MAX_CELLS + 1];
    uint64_t ending[WORDS];  /* the cells at which a search that has read something has matched */
    uint64_t telling[WORDS]; /* the cells that tell states apart */
    float *ways;             /* [state][cell] */
    uint64_t *active;        /* [state][word]: the cells with ways */
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
    uint64_t step_active[WORDS];
    uint64_t step_certain[WORDS];
    uint64_t step_matched[WORDS]; /* the cells at which a search has surely matched */
    uint16_t queue[OFW_MAX_STATES];
} finder;

static inline int bit(const uint64_t *words, uint32_t index) { return (int)(words[index / 64] >> (index % 64) & 1); }

/* Return the first cell of a set from `from` on, or the end of the set. */
static inline uint32_t next_in(const uint64_t *words, uint32_t from)
{
    for (uint32_t word = from / 64; word < WORDS; word++) {
        uint64_t rest = word == from / 64 ? words[word] & (~UINT64_C(0) << (from % 64)) : words[word];
        if (rest)
            return word * 64 + (uint32_t)__builtin_ctzll(rest);
    }
    return OFW_MAX_CELLS;
}

#define EACH(cell, words) \
    for (uint32_t cell = next_in(words, 0); cell < OFW_MAX_CELLS; cell = cell + 1 < OFW_MAX_CELLS ? next_in(words, cell + 1) : OFW_MAX_CELLS)

static inline void set(uint64_t *words, uint32_t index) { words[index / 64] |= UINT64_C(1) << (index % 64); }

/* Of the cells at which a search has matched only one is come to, by one way: nothing is left again. */
static inline int on_the_last_way(const ofw_pattern *p, uint32_t cell) { return p->ends[cell] && p->may[cell]; }

/* Choose the cells that tell states apart. */
void choose_telling(finder *f);

/* Fill step_ways and step_certain with what reading a kind makes of a state. Returns -1 when ways have become
 * too many. */
int read_kind(finder *f, uint32_t state, uint32_t kind);

/* Take what was read into the state it belongs to. Returns the state, or NONE; `changed` when it grew. */
uint32_t take(finder *f, uint32_t kind, int begins, int *changed);

#endif
