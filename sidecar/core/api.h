int outfeed_sidecar_abi(void);
