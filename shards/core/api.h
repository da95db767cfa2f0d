int outfeed_shards_abi(void);
