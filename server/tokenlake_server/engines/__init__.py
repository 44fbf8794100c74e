"""The engines of this machine: the local socket, processes and tenants, and the memory shared with them."""
