#include "api.h"

int outfeed_shards_abi(void) { return 1; }
