"""From the command line to a running daemon, and what outlives it: settings, limits of the machine, files."""
