"""Programs that run one engine each, in the environment of that engine. Only radixkv_worker imports radixkv."""
