"""The engines: addresses, connections, health, load, and the wait for room on them."""
