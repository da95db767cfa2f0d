/* Preloaded before a program: which growth of an array finds no memory is the test's to say, not the heap's.
 *
 * Each array that grows moves, and holds other bytes where it was. Smaller ones (Python's own) are left alone.
 */
#include <malloc.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LARGE (64u << 10)

uint32_t growths_until_failure; /* 1: the next one fails; 0: none does */

void *__libc_realloc(void *old, size_t size);

void *realloc(void *old, size_t size)
{
    if (size < LARGE) return __libc_realloc(old, size);
    if (growths_until_failure && --growths_until_failure == 0) return NULL;
    uint8_t *moved = malloc(size);
    if (moved == NULL || old == NULL) return moved;
    size_t had = malloc_usable_size(old);
    memcpy(moved, old, had < size ? had : size);
    memset(old, 0xA5, had);
    free(old);
    return moved;
}
