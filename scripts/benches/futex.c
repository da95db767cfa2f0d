/* The floor under any wake-up: two processes, two futexes, nothing else. `rounds` round trips; each side
 * is asleep when it is woken. Prints each round trip in nanoseconds to `out`. */

#define _GNU_SOURCE
#include <linux/futex.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

typedef struct {
    _Alignas(128) _Atomic uint32_t ping;
    _Alignas(128) _Atomic uint32_t pong;
} words;

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void sleep_until(_Atomic uint32_t *word, uint32_t value) {
    uint32_t seen;
    while ((seen = atomic_load(word)) != value) syscall(SYS_futex, word, FUTEX_WAIT, seen, NULL, NULL, 0);
}

static void wake(_Atomic uint32_t *word, uint32_t value) {
    atomic_store(word, value);
    syscall(SYS_futex, word, FUTEX_WAKE, 1, NULL, NULL, 0);
}

int ping_pong(uint32_t rounds, uint32_t pause_us, int64_t *out) {
    words *w = mmap(NULL, sizeof *w, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (w == MAP_FAILED) return -1;
    pid_t child = fork();
    if (child < 0) return -1;
    if (child == 0) {
        for (uint32_t i = 1; i <= rounds; i++) {
            sleep_until(&w->ping, i);
            wake(&w->pong, i);
        }
        _exit(0);
    }
    for (uint32_t i = 1; i <= rounds; i++) {
        usleep(pause_us);
        int64_t start = now();
        wake(&w->ping, i);
        sleep_until(&w->pong, i);
        out[i - 1] = now() - start;
    }
    int status;
    waitpid(child, &status, 0);
    munmap(w, sizeof *w);
    return status;
}
