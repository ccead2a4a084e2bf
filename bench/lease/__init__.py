"""What the lease service costs: time, CPU and memory, with and without etcd."""

import os

# Servers are started while gRPC's threads run; its fork handlers would only warn of that. What
# goes wrong is told in one line of our own.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
