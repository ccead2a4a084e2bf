"""What kvturn's parts share: contracts, and how they reach and trust each other.

Whatever is imported from here first, gRPC's own log is off by then: what it says again and again,
in its own words, each part says once, with the reason. Set GRPC_VERBOSITY to have it back.
"""

import os

# Read when gRPC is first imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
