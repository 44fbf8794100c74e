"""The bytes of segments between daemons: bulk connections, their threads, and the choice of a transport."""
