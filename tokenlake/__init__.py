"""The rules of TokenLake, with no I/O: time, randomness, network and disk come from outside."""
