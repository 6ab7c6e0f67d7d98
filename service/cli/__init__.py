"""The command line `radixkv`: a module for each command, and modules that these import."""

import os

# gRPC's core would print a line on stderr for each broken call, with text that the peer chose. gRPC reads this variable
# once, when it is imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
