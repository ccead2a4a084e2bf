"""What listens: HTTP and gRPC, operators' routes, and limits on what may come in."""
