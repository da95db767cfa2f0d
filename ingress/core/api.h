/* What Python sees of the search for the worst text: plain declarations, read by the C compiler and by cffi.
 *
 * A pattern is given as cells, each of which reads one character. Characters are given as kinds: a bit each in
 * a 64-bit mask, the last of them (`edge`) for the place before the text.
 */

enum { OFW_OK = 0, OFW_NO_MEMORY = -1, OFW_BAD_INPUT = -2, OFW_TOO_MUCH = -3 };

enum { OFW_MAX_CELLS = 512, OFW_MAX_KINDS = 48, OFW_MAX_STATES = 2048, OFW_TEXT = 512 };

/* Cell 0 is the start of a search. All arrays are the caller's and are only read. */
typedef struct {
    uint32_t cells, edges, joins, trials, finals, cuts, tests, kinds;
    /* By cell: the kinds it may read (none: it is a hub) and those it surely reads, what being there costs (ns),
     * whether a search that comes there has matched. */
    const uint64_t *may, *surely;
    const float *cost;
    const uint8_t *ends;
    /* By edge, ordered by source: on how many ways, after and before which kinds; `sharp` when the engine takes
     * it whenever the text allows. */
    const uint16_t *edge_source, *edge_target;
    const float *edge_ways;
    const uint64_t *edge_before, *edge_after;
    const uint8_t *edge_sharp;
    /* By join, an edge into a hub that reads nothing: hub after hub, each after those it is joined from. */
    const uint16_t *join_source, *join_target;
    const float *join_ways;
    const uint64_t *join_before;
    const uint8_t *join_sharp;
    /* By trial, ordered by cell: what is asked of the next character, on how many ways, after and before which
     * kinds. It costs `besides` and prices[test * kinds + kind] (ns). */
    const uint16_t *trial_cell;
    const float *trial_ways;
    const uint64_t *trial_before, *trial_after;
    const float *trial_besides;
    const uint16_t *trial_test;
    const float *prices;
    /* By final, a way to leave a cell with which the match is surely complete: after and before which kinds. */
    const uint16_t *final_source;
    const uint64_t *final_before, *final_after;
    /* By cut: once it is sure that a search has matched at `cut_end`, there are so many ways at `cut_cell` at most. */
    const uint16_t *cut_end, *cut_cell;
    const float *cut_most;
    /* By kind, the edge included: kinds with the same number are alike to whatever comes after. */
    const uint8_t *alike;
    /* Matching nothing is a match: only one search begins. */
    uint8_t matches_nothing;
    /* By cell: the most that all it leads to can cost, in ns, where ways do not come round; else NULL. Then the last
     * search is not followed when no more begin. */
    const float *rest;
    /* Ways that are further from the start than this do not tell states apart. */
    uint32_t depth;
    /* States with as many ways, to so many binary digits, are taken together; 0: whatever their number. */
    uint32_t digits;
    uint32_t max_work;
} ofw_pattern;

typedef struct {
    /* A search costs at most `first` + `each` for each character, in ns. */
    double first, each;
    uint32_t states, work;
    /* Kinds of the characters of a text that is about as bad as can be; after OFW_TOO_MUCH, of one with which ways
     * become too many, if that was it. */
    uint32_t length;
    uint8_t text[OFW_TEXT];
} ofw_worst;

int ofw_find(const ofw_pattern *pattern, ofw_worst *worst);
