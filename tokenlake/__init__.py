"""TokenLake: the names that a program needs, loaded when they are first used. The modules of this package are the rules
of the pool, with no I/O: time, randomness, network and disk come from outside."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenlake.errors import (
        ClusterRefused,
        ConfigurationError,
        CredentialRefused,
        DeadlinePassed,
        LayoutRefused,
        LimitReached,
        ListenerUntrusted,
        MembershipRefused,
        ProtocolRefused,
        Refused,
        RingRefused,
        TokenLakeError,
        Unreachable,
    )
    from tokenlake.hints import Hints, Outlook
    from tokenlake.layout import Layout
    from tokenlake.opaque_layout import OpaqueLayout
    from tokenlake.wire import Code
    from tokenlake_client import Deadlines, Lease, MatchOptions, Pool, Write

__all__ = [
    "ClusterRefused",
    "Code",
    "ConfigurationError",
    "CredentialRefused",
    "DeadlinePassed",
    "Deadlines",
    "Hints",
    "Layout",
    "LayoutRefused",
    "Lease",
    "LimitReached",
    "ListenerUntrusted",
    "MatchOptions",
    "MembershipRefused",
    "OpaqueLayout",
    "Outlook",
    "Pool",
    "ProtocolRefused",
    "Refused",
    "RingRefused",
    "TokenLakeError",
    "Unreachable",
    "Write",
]
_MODULES = (
    *("tokenlake.errors", "tokenlake.hints", "tokenlake.layout", "tokenlake.opaque_layout", "tokenlake.wire"),
    "tokenlake_client",
)


def __getattr__(name: str) -> Any:
    if name in __all__:
        for module in map(import_module, _MODULES):
            if hasattr(module, name):
                globals()[name] = getattr(module, name)
                return globals()[name]
    raise AttributeError(f"module 'tokenlake' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
