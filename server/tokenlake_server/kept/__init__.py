"""Memory that outlives the daemon: the process or service manager that holds its descriptors, the ledger that says what
is in it, and the engines that still map it."""
