/* A fuzzer over a segment's bytes: the input is a program that scribbles over a small ring, header
 * included, and works on it in between.
 *
 * Whatever the bytes are, every call must come back, touch nothing outside the segment (it lies in its own
 * allocation, with AddressSanitizer around it) and hand out frames that lie in their lane's area.
 *
 * Built with clang's -fsanitize=fuzzer this is a libFuzzer target. Built with -DSTANDALONE by any compiler
 * it replays the corpus files it is given and then mutates them: fuzz SEED MILLISECONDS FILE... Built with -DTORN
 * (tests/torn.h) the segment also changes within a call, between any two looks at a word. */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "api.h"

#ifdef TORN
#include "torn.h"
#define WHOLE(condition) MUST(1) /* what holds only of memory that stays as it is */
#else
#define WHOLE(condition) MUST(condition)
#endif

enum { LANES = 2, CONSUMERS = 2, CAPACITY = 4096, LIMIT = 64, MOST_STEPS = 400 };

#define MUST(condition)                                                                  \
    do {                                                                                 \
        if (!(condition)) {                                                              \
            fprintf(stderr, "%s:%d: %s does not hold\n", __FILE__, __LINE__, #condition); \
            abort();                                                                     \
        }                                                                                \
    } while (0)

typedef struct {
    const uint8_t *at, *end;
} input;

static uint64_t take(input *in, int bytes) {
    uint64_t value = 0;
    for (int i = 0; i < bytes && in->at < in->end; i++) value |= (uint64_t)*in->at++ << (8 * i);
    return value;
}

typedef struct {
    ring ring;
    uint8_t *base;
    uint64_t bytes;
    lane_writer *writer;
    lane_reader *reader;
    int reserved;
} world;

static void drop_writer(world *w) {
    if (w->writer == NULL) return;
    writer_close(w->writer);
    writer_free(w->writer);
    w->writer = NULL;
    w->reserved = 0;
}

static void drop_reader(world *w) {
    if (w->reader == NULL) return;
    reader_close(w->reader);
    reader_free(w->reader);
    w->reader = NULL;
}

static void claim_writer(world *w, uint32_t lane) {
    drop_writer(w);
    lane %= w->ring.lanes;
    if (writer_claim(&w->ring, lane, lane_owner(&w->ring, lane), 7, &w->writer) != RING_OK) drop_writer(w);
}

static void claim_reader(world *w, uint32_t index) {
    drop_reader(w);
    index %= w->ring.consumers;
    if (reader_claim(&w->ring, index, consumer_owner(&w->ring, index), 9, "outfeed-fuzz", &w->reader) != RING_OK)
        w->reader = NULL;
}

static void check_header(world *w) {
    uint64_t found[4];
    ring other;
    if (ring_check(w->base, w->bytes, &other, found) != RING_OK) return;
    MUST(ring_bytes(other.lanes, other.consumers, other.capacity) == w->bytes);
    drop_writer(w);
    drop_reader(w);
    w->ring = other; /* a header that adds up is a ring, whatever it was before */
}

static void read_frames(world *w, input *in) {
    static uint32_t lane[LIMIT], tag[LIMIT];
    static uint64_t start[LIMIT], end[LIMIT], upto[RING_MAX_LANES];
    frames out = {lane, tag, start, end};
    uint8_t how = (uint8_t)take(in, 1);
    if (how & 64) MUST(reader_tails(w->reader, upto) == RING_OK);
    int n = reader_read(w->reader, 1 + how % LIMIT, how & 64 ? upto : NULL, &out);
    MUST(n >= 0 || n == RING_CORRUPT);
    if (n == RING_CORRUPT) MUST(reader_fault_lane(w->reader) < w->ring.lanes);
    uint64_t sum = 0;
    for (int i = 0; i < n; i++) {
        uint64_t area = w->ring.data + lane[i] * w->ring.capacity;
        MUST(lane[i] < w->ring.lanes && tag[i] < 256);
        MUST(start[i] >= area && start[i] <= end[i] && end[i] <= area + w->ring.capacity);
        MUST(end[i] - start[i] <= w->ring.capacity / 4 && start[i] % 16 == 0);
        for (uint64_t p = start[i]; p < end[i]; p++) sum += w->base[p];
    }
    *(volatile uint64_t *)&sum;
}

static void write_frame(world *w, input *in) {
    static const uint8_t body[2048];
    uint64_t size = take(in, 2) % 1400, at;
    part parts[2] = {{body, size / 2}, {body, size - size / 2}};
    if (w->reserved) {
        writer_commit(w->writer, 3, size);
        writer_cancel(w->writer);
        w->reserved = 0;
    } else if (size & 1) {
        writer_write(w->writer, (int)(size % 300), parts, 2, size & 2 ? 20000 : 0);
    } else if (writer_reserve(w->writer, size, 0, &at) == RING_OK) {
        MUST(at >= w->ring.data && at + size <= w->bytes);
        memset(w->base + at, 1, size);
        w->reserved = 1;
    }
}

static void scribble(world *w, input *in) {
    uint64_t at = take(in, 2) % w->bytes, length = 1 + take(in, 1) % 16;
    for (uint64_t i = 0; i < length && at + i < w->bytes && in->at < in->end; i++) w->base[at + i] = *in->at++;
}

/* A word of the tables or a record's header, set to something near what it was: what random bytes rarely hit. */
static void nudge(world *w, input *in) {
    uint64_t at = (take(in, 2) * 8) % (w->bytes - 8), value;
    memcpy(&value, w->base + at, 8);
    value += (uint64_t)(int64_t)(int8_t)take(in, 1) << (take(in, 1) % 64);
    memcpy(w->base + at, &value, 8);
}

/* One of the words that lead somewhere: a tail, a head, or a record's header at or near a head. */
static uint64_t target(world *w, input *in) {
    uint8_t which = (uint8_t)take(in, 1);
    uint32_t lane = (which >> 2) % w->ring.lanes, index = (which >> 4) % w->ring.consumers;
    uint64_t head_at = w->ring.heads + ((uint64_t)index * w->ring.lanes + lane) * 128, head;
    memcpy(&head, w->base + head_at, 8);
    switch (which & 3) {
    case 0: return 4096 + (uint64_t)lane * 512;
    case 1: return head_at;
    default:
        head += 16 * (take(in, 1) % 8);
        return w->ring.data + lane * w->ring.capacity + (head & (w->ring.capacity - 16)) + 8 * (which & 1);
    }
}

static void aim(world *w, input *in) {
    static const uint64_t liked[] = {0, 1, 8, 16, 24, 1024, 1040, 4080, 4088, 4096, 8192, UINT32_MAX, UINT64_MAX - 15};
    uint64_t at = target(w, in), value;
    uint8_t how = (uint8_t)take(in, 1);
    memcpy(&value, w->base + at, 8);
    uint64_t by = liked[(how >> 2) % (sizeof liked / sizeof *liked)];
    value = (how & 3) == 0 ? by : (how & 3) == 1 ? value + by : (how & 3) == 2 ? value - by : value ^ by << 40;
    memcpy(w->base + at, &value, 8);
}

static void look(world *w, input *in) {
    lane_stats l;
    consumer_stats c;
    uint32_t i = (uint32_t)take(in, 1);
    if (ring_lane_stats(&w->ring, i, &l) == RING_OK) MUST(l.used <= w->ring.capacity);
    ring_consumer_stats(&w->ring, i, &c);
    if (i % 4 == 3) {
        i = (i / 4) % w->ring.consumers;
        if (w->reader) drop_reader(w);
        int code = consumer_detach(&w->ring, i, consumer_owner(&w->ring, i), 5);
        WHOLE(code == RING_OK);
        (void)code;
    }
}

static void step(world *w, input *in) {
    switch (take(in, 1) % 12) {
    case 0: scribble(w, in); break;
    case 1: nudge(w, in); break;
    case 2: if (w->writer) write_frame(w, in); break;
    case 3: if (w->reader) read_frames(w, in); break;
    case 4: if (w->reader) MUST(reader_release(w->reader) == RING_OK); break;
    case 5: if (w->reader) MUST(reader_pending(w->reader) >= 0); break;
    case 6: claim_writer(w, (uint32_t)take(in, 1)); break;
    case 7: claim_reader(w, (uint32_t)take(in, 1)); break;
    case 8: look(w, in); break;
    case 9:
    case 10: aim(w, in); break;
    default: check_header(w); break;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static uint8_t *base;
    static uint8_t fresh[1 << 16];
    input in = {data, data + size};
    world w = {0};
    uint64_t found[4];
    w.bytes = ring_bytes(LANES, CONSUMERS, CAPACITY);
    MUST(w.bytes != 0 && w.bytes <= sizeof fresh);
    if (base == NULL) base = aligned_alloc(4096, w.bytes);
    w.base = base;
    memset(base, 0, w.bytes);
    MUST(ring_format(base, w.bytes, LANES, CONSUMERS, CAPACITY, "fuzz", 1, 0) == RING_OK);
    MUST(ring_check(base, w.bytes, &w.ring, found) == RING_OK);
    claim_writer(&w, 0);
    claim_reader(&w, 0);
#ifdef TORN
    torn_begin(base, w.bytes, size + (size ? data[size / 2] : 0));
#endif
    for (int i = 0; i < MOST_STEPS && in.at < in.end; i++) step(&w, &in);
    drop_writer(&w);
    drop_reader(&w);
#ifdef TORN
    torn_begin(NULL, 0, 0);
#endif
    return 0;
}

#ifdef STANDALONE

static uint64_t next(uint64_t *state) {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

static double now(void) {
    struct timespec t;
    timespec_get(&t, TIME_UTC);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static size_t load(const char *path, uint8_t *out, size_t most) {
    FILE *file = fopen(path, "rb");
    if (file == NULL) return 0;
    size_t n = fread(out, 1, most, file);
    fclose(file);
    return n;
}

static size_t mutate(uint8_t *bytes, size_t n, size_t most, uint64_t *rng) {
    for (uint64_t i = next(rng) % 8 + 1; i; i--) {
        if (n < most && next(rng) % 3 == 0) bytes[n++] = (uint8_t)next(rng);
        if (n) bytes[next(rng) % n] = (uint8_t)next(rng);
    }
    return n;
}

int main(int argc, char **argv) {
    static uint8_t bytes[4096];
    uint64_t rng = argc > 1 ? strtoull(argv[1], NULL, 10) * 2 + 1 : 1, runs = 0;
    double seconds = argc > 2 ? atof(argv[2]) / 1000 : 1;
    for (int i = 3; i < argc; i++, runs++) LLVMFuzzerTestOneInput(bytes, load(argv[i], bytes, sizeof bytes));
    for (double until = now() + seconds; now() < until; runs++) {
        size_t n = argc > 3 ? load(argv[3 + next(&rng) % (uint64_t)(argc - 3)], bytes, sizeof bytes) : 0;
        if (n == 0 || next(&rng) % 4 == 0)
            for (n = 0; n < 600; n++) bytes[n] = (uint8_t)next(&rng);
        n = mutate(bytes, n, sizeof bytes, &rng);
        FILE *last = fopen("last-input", "wb"); /* what a crash leaves behind */
        if (last) {
            fwrite(bytes, 1, n, last);
            fclose(last);
        }
        LLVMFuzzerTestOneInput(bytes, n);
    }
    printf("runs %llu\n", (unsigned long long)runs);
    return 0;
}

#endif
