#include "check.h"
#include "api.h"

uint64_t outfeed_check(const uint8_t *data, size_t size, uint64_t seed)
{
    return outfeed_check_bytes(data, size, seed);
}
