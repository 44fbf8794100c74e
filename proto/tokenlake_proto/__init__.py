"""The gRPC contract of TokenLake's daemons, package `tokenlake.v1`: generated from `proto/tokenlake`.

`python -m tests.proto.generate` writes the modules of the packages below this one.
"""
