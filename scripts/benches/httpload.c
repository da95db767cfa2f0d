/* Load for a streaming HTTP server, and what its clients see of it.
 *
 *     httpload PORT CONNECTIONS TOKENS SECONDS WARMUP PATH BODY
 *
 * Keeps CONNECTIONS requests running over kept-alive connections to 127.0.0.1, each a POST of BODY that is
 * answered with server-sent events of TOKENS tokens together. Every event is read: how many tokens it brings
 * is the step in its "completion_tokens". After WARMUP seconds it counts for SECONDS and prints one JSON
 * object: tokens, events, requests, errors, and the percentiles of the time to the first event (from the
 * request's send) and between events of a stream, in microseconds. One thread, one epoll.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { BUFFER = 1 << 20, EVENTS = 256 };

struct samples {
    float *at;
    size_t count, room;
};

struct connection {
    int fd;
    size_t length;  /* bytes in buffer */
    int last_tokens;
    uint64_t asked, last;
    char *buffer;
};

static struct {
    int port, tokens, measuring;
    const char *request;
    size_t request_length;
    uint64_t events, token_count, requests, errors;
    struct samples first, between;
} load;

static void die(const char *what) {
    perror(what);
    exit(1);
}

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void record(struct samples *s, uint64_t ns) {
    if (!load.measuring) return;
    if (s->count == s->room) {
        s->room = s->room ? 2 * s->room : 1 << 16;
        s->at = realloc(s->at, s->room * sizeof *s->at);
        if (!s->at) die("realloc");
    }
    s->at[s->count++] = (float)ns / 1e3f;
}

static int compare(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

static double percentile(struct samples *s, double p) {
    return s->count ? s->at[(size_t)(p * (double)(s->count - 1))] : 0.0;
}

static void ask(struct connection *c) {
    c->length = 0;
    c->last_tokens = 0;
    c->asked = now_ns();
    if (send(c->fd, load.request, load.request_length, MSG_NOSIGNAL) != (ssize_t)load.request_length) die("send");
}

static void open_connection(struct connection *c, int epoll) {
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons((uint16_t)load.port)};
    struct epoll_event want = {.events = EPOLLIN, .data.ptr = c};
    int one = 1;
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    c->fd = socket(AF_INET, SOCK_STREAM, 0);
    if (c->fd < 0 || connect(c->fd, (struct sockaddr *)&to, sizeof to) < 0) die("connect");
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (epoll_ctl(epoll, EPOLL_CTL_ADD, c->fd, &want) < 0) die("epoll_ctl");
    ask(c);
}

/* Count one event; return 1 when it ends the stream. */
static int take(struct connection *c, const char *event, size_t length, uint64_t now) {
    static const char key[] = "\"completion_tokens\":";
    const char *found;
    int tokens;
    if (length >= 12 && !memcmp(event, "data: [DONE]", 12)) {
        if (load.measuring) load.requests++;
        if (c->last_tokens != load.tokens) load.errors++;
        return 1;
    }
    found = memmem(event, length, key, sizeof key - 1);
    if (!found) {
        load.errors++;
        return 0;
    }
    tokens = atoi(found + sizeof key - 1);
    if (c->last_tokens == 0)
        record(&load.first, now - c->asked);
    else
        record(&load.between, now - c->last);
    if (load.measuring) {
        load.events++;
        load.token_count += (uint64_t)(tokens - c->last_tokens);
    }
    c->last_tokens = tokens;
    c->last = now;
    return 0;
}

static void readable(struct connection *c) {
    ssize_t got = recv(c->fd, c->buffer + c->length, BUFFER - c->length, 0);
    uint64_t now = now_ns();
    char *at = c->buffer, *end;
    if (got <= 0) die("the server closed a connection");
    c->length += (size_t)got;
    end = c->buffer + c->length;
    for (;;) {
        char *event = memmem(at, (size_t)(end - at), "data: ", 6), *stop;
        if (!event) break;
        stop = memmem(event, (size_t)(end - event), "\n\n", 2);
        if (!stop) {
            at = event;
            break;
        }
        if (take(c, event, (size_t)(stop - event), now)) {
            /* The last chunk follows, in the same segment or the next. */
            at = stop + 2;
            while (!memmem(at, (size_t)(end - at), "0\r\n\r\n", 5)) {
                got = recv(c->fd, end, BUFFER - (size_t)(end - c->buffer), 0);
                if (got <= 0) die("the server closed a connection");
                end += got;
            }
            ask(c);
            return;
        }
        at = stop + 2;
    }
    /* Keep what may be the beginning of an event; a head or a chunk's frame is passed over. */
    if (end - at > 16 && memcmp(at, "data: ", 6) != 0) at = end - 16;
    c->length = (size_t)(end - at);
    memmove(c->buffer, at, c->length);
    if (c->length == BUFFER) {
        fprintf(stderr, "an event is larger than %d bytes\n", BUFFER);
        exit(1);
    }
}

static void print(double seconds) {
    struct samples *f = &load.first, *b = &load.between;
    qsort(f->at, f->count, sizeof *f->at, compare);
    qsort(b->at, b->count, sizeof *b->at, compare);
    printf("{\"seconds\": %.3f, \"tokens\": %llu, \"events\": %llu, \"requests\": %llu, \"errors\": %llu, "
           "\"first_us\": [%.1f, %.1f], \"between_us\": [%.1f, %.1f]}\n",
           seconds, (unsigned long long)load.token_count, (unsigned long long)load.events,
           (unsigned long long)load.requests, (unsigned long long)load.errors, percentile(f, 0.5),
           percentile(f, 0.99), percentile(b, 0.5), percentile(b, 0.99));
}

int main(int argc, char **argv) {
    int connections, epoll = epoll_create1(0);
    struct connection *all;
    struct epoll_event ready[EVENTS];
    uint64_t begin, start, stop;
    char *request;
    if (argc != 8) {
        fprintf(stderr, "usage: httpload PORT CONNECTIONS TOKENS SECONDS WARMUP PATH BODY\n");
        return 2;
    }
    load.port = atoi(argv[1]);
    connections = atoi(argv[2]);
    load.tokens = atoi(argv[3]);
    load.request_length = (size_t)asprintf(&request,
        "POST %s HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: %zu\r\n\r\n%s",
        argv[6], strlen(argv[7]), argv[7]);
    load.request = request;
    all = calloc((size_t)connections, sizeof *all);
    for (int i = 0; i < connections; i++) {
        all[i].buffer = malloc(BUFFER);
        open_connection(&all[i], epoll);
    }
    begin = now_ns();
    start = begin + (uint64_t)(atof(argv[5]) * 1e9);
    stop = start + (uint64_t)(atof(argv[4]) * 1e9);
    for (;;) {
        int count = epoll_wait(epoll, ready, EVENTS, 100);
        uint64_t now = now_ns();
        if (count < 0 && errno != EINTR) die("epoll_wait");
        if (!load.measuring && now >= start) {
            load.measuring = 1;
            start = now;
        }
        if (now >= stop) {
            print((double)(now - start) / 1e9);
            return 0;
        }
        for (int i = 0; i < count; i++) readable(ready[i].data.ptr);
    }
}
