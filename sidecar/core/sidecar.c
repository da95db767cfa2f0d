#include "api.h"

int outfeed_sidecar_abi(void) { return 1; }
