"""The cluster on a simulated clock: the real rules of the daemons (`NodeCore`), a simulated network, and engines that
match, fetch and store without bytes."""
