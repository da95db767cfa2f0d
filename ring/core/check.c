#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "api.h"

uint64_t outfeed_sum_u32(const uint8_t *data, size_t size, size_t at, size_t count) {
    uint64_t sum = 0;
    if (at > size || count > (size - at) / 4) return UINT64_MAX;
    for (size_t i = 0; i < count; i++) {
        uint32_t value;
        memcpy(&value, data + at + 4 * i, sizeof value);
        sum += value;
    }
    return sum;
}

int outfeed_ascending_u32(const uint8_t *data, size_t size, size_t at, size_t count, uint32_t limit) {
    if (at > size || count > (size - at) / 4) return 0;
    uint64_t least = 0;
    for (size_t i = 0; i < count; i++) {
        uint32_t value;
        memcpy(&value, data + at + 4 * i, sizeof value);
        if (value < least || value >= limit) return 0;
        least = (uint64_t)value + 1;
    }
    return 1;
}
