/* Memory that runs out: one allocation in `scarce` fails, and each one that grows moves. 0: none does.
 *
 * Link with -Wl,--wrap=malloc,--wrap=calloc,--wrap=realloc: then it holds for all that is compiled into the program.
 */
#ifndef OUTFEED_SCARCE_H
#define OUTFEED_SCARCE_H

#include <malloc.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

static uint32_t scarce;

void *__real_malloc(size_t size);
void *__real_calloc(size_t count, size_t size);

static int scarce_fails(void)
{
    static uint64_t state = 88172645463325252u;
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return scarce != 0 && (state >> 11) % scarce == 0;
}

void *__wrap_malloc(size_t size) { return scarce_fails() ? NULL : __real_malloc(size); }

void *__wrap_calloc(size_t count, size_t size) { return scarce_fails() ? NULL : __real_calloc(count, size); }

void *__wrap_realloc(void *old, size_t size)
{
    void *moved = scarce_fails() ? NULL : __real_malloc(size);
    size_t had = old == NULL ? 0 : malloc_usable_size(old);
    if (moved == NULL) return NULL;
    if (old != NULL) memcpy(moved, old, had < size ? had : size);
    free(old);
    return moved;
}

#endif
