"""The command line `radixkv`: one module for each group of commands, and what they print."""

import os

# Lines of gRPC's core, one for each broken call, repeat what strangers send. It reads this once, as it is imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
