"""The router's talk with the lease service, and what stands in for it without one."""
