"""The control connections with the daemons of other nodes: handshakes, certificates, addresses, measurements."""
