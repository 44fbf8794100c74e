"""The transports, which copy segments from the memory of one daemon into that of another one: `base` is the contract,
`choice` the registry."""
