"""Programs that run one engine each, in that engine's own environment. Only ours imports radixkv."""
