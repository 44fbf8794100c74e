"""The control loop of a daemon: it drives the rules, and no call on it waits."""
