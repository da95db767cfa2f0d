/* The floor under any transport that copies: one process copies bodies into shared memory, another
 * follows a counter. No records, no checks, no sleeping. */

#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

typedef struct {
    _Alignas(128) _Atomic uint64_t written;
    _Alignas(128) _Atomic uint64_t read;
    _Alignas(128) _Atomic uint64_t last; /* 0 while the writer goes on */
    uint8_t rest[4096 - 3 * 128];
    uint8_t slots[];
} area_t;

/* Spin a little, then let others run: a bare spin on a shared core measures the scheduler. */
static void relax(uint32_t *spins) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
    if (++*spins % 256 == 0) sched_yield();
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

void *area(uint64_t bytes) {
    return mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
}

void drop(void *a, uint64_t bytes) { munmap(a, bytes); }

void copy_out(area_t *a, const uint8_t *body, uint64_t size, uint64_t slots, double seconds) {
    double deadline = now() + seconds;
    uint32_t spins = 0;
    uint64_t n = 0;
    while ((n & 15) || now() < deadline) {
        while (n - atomic_load_explicit(&a->read, memory_order_acquire) >= slots) relax(&spins);
        memcpy(a->slots + (n % slots) * size, body, size);
        atomic_store_explicit(&a->written, ++n, memory_order_release);
    }
    atomic_store(&a->last, n);
}

uint64_t copy_in(area_t *a, uint64_t size, uint64_t slots, double *elapsed) {
    uint32_t spins = 0;
    uint64_t n = 0, sum = 0;
    double start = 0;
    for (;;) {
        uint64_t to = atomic_load_explicit(&a->written, memory_order_acquire);
        if (to == n) {
            uint64_t last = atomic_load(&a->last);
            if (last && last == n) break;
            relax(&spins);
            continue;
        }
        if (!start) start = now();
        for (; n < to; n++) sum += a->slots[(n % slots) * size];
        atomic_store_explicit(&a->read, n, memory_order_release);
    }
    *elapsed = now() - start;
    return n + (sum == UINT64_MAX);
}
