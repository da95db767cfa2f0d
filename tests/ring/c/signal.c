/* A doorbell rung by hand and a signal, both in one sleep: the signal's handler is what rings.
 *
 * usage: signal      exit status 1 when the wait does not return for the ring */

#define _GNU_SOURCE
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/time.h>

#include "api.h"

static bell *rung;

static void ring_it(int number) {
    (void)number;
    bell_ring(rung);
}

static void *memory(size_t bytes) {
    return mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
}

int main(void) {
    uint64_t bytes = ring_bytes(1, 1, RING_MIN_CAPACITY), found[4];
    void *base = memory(bytes), *bell_base = memory(RING_BELL_BYTES);
    ring r;
    lane_reader *c;
    if (ring_format(base, bytes, 1, 1, RING_MIN_CAPACITY, "signal", 1, 0) != RING_OK ||
        ring_check(base, bytes, &r, found) != RING_OK ||
        bell_format(bell_base, RING_BELL_BYTES, 1) != RING_OK || (rung = bell_open(bell_base, 0)) == NULL ||
        reader_claim(&r, 0, 0, 1, "outfeed-signal", &c) != RING_OK)
        return 2;
    struct sigaction act = {.sa_handler = ring_it};
    struct itimerval soon = {.it_value = {.tv_usec = 100000}};
    sigaction(SIGALRM, &act, NULL);
    setitimer(ITIMER_REAL, &soon, NULL);
    int rc = readers_wait(rung, &c, 1, 1000000000);
    printf("the wait returned %d\n", rc);
    return rc == 0 ? 0 : 1;
}
