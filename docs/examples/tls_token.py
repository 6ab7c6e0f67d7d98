"""Call a server with TLS and tokens: tls_token.py ADDRESS CA_FILE, with the token in RADIXKV_TOKEN."""

import os
import sys

from radixkv.service.client import Client, PermissionDenied

if len(sys.argv) != 3 or "RADIXKV_TOKEN" not in os.environ:
    sys.exit(__doc__)
ADDRESS, CA_FILE = sys.argv[1:]

with Client(ADDRESS, tls_ca=CA_FILE, token=os.environ["RADIXKV_TOKEN"], timeout_s=60) as client:
    print(f"{client.prefill(range(100)).usage.prompt_tokens} tokens as the tenant that the token names")
    try:
        client.prefill(range(100), tenant="another")
    except PermissionDenied as error:
        print(error.code().name)
