"""Subscribe to cache events as a router does: a snapshot first, then each change."""

import sys

from radixkv.service.client import Client

ADDRESS = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"

with Client(ADDRESS, timeout_s=60) as client:
    batches = client.subscribe(0)
    first = next(batches)
    print(f"begins with a snapshot: {first.HasField('snapshot')}")
    client.prefill(range(300, 364), tenant="example-events")
    stored = (event.stored for batch in batches for event in batch.events if event.HasField("stored"))
    tokens = next(each.token_ids for each in stored if 363 in each.token_ids)
    print(f"stored tokens up to {tokens[-1]}")
    batches.close()
