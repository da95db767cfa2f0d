int outfeed_ring_abi(void);
