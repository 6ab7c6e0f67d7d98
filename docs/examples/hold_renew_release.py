"""Hold a lease on the blocks of a prompt, as another server that decodes needs it; renew it, and release it."""

import sys

from radixkv.service.client import Client

ADDRESS = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"

with Client(ADDRESS, timeout_s=60) as client:
    held = client.prefill(range(128), tenant="example-hold", hold_lease=True)
    print(f"{held.usage.prompt_tokens} tokens are held, in blocks of {held.block_size}")
    until = client.renew(held.lease_id, tenant="example-hold").lease_expires_at
    print(f"renewed: {until.ToDatetime() >= held.lease_expires_at.ToDatetime()}")
    client.release(held.lease_id, tenant="example-hold")
    print("released")
