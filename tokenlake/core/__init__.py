"""The rules of one node as a state machine: events in, instructions out."""

from tokenlake.core.context import CoreConfig
from tokenlake.core.node import NodeCore

__all__ = ["CoreConfig", "NodeCore"]
