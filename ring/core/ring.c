#include "api.h"

int outfeed_ring_abi(void) { return 1; }
