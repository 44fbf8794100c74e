"""Errors that several parts of a daemon raise at its start: an address that cannot be listened at, a missing module."""

from __future__ import annotations

import errno

from tokenlake.config import Address
from tokenlake.errors import ConfigurationError


def address_error(setting: str, address: Address, error: OSError) -> ConfigurationError:
    """The error of a setting that names `address`, where the kernel refused to listen with `error`."""
    match error.errno:
        case errno.EADDRNOTAVAIL:
            expected = (
                "an address that `ip address` shows, because no interface of this machine has this one; behind NAT "
                "give that of an interface here, and set 'advertise'"
            )
        case errno.EACCES:
            expected = f"a port of 1024 or more, because lower ones are for root ({error.strerror})"
        case errno.EADDRINUSE:
            expected = (
                f"an address that is free ({error.strerror}); give each daemon of a machine its own, or end the "
                f"process that has the port (`ss -ltnp 'sport = :{address.port}'` names it)"
            )
        case _:
            expected = f"an address at which this machine can listen ({error.strerror or error})"
    return ConfigurationError(setting, str(address), expected)


class ModuleMissing(ConfigurationError):
    """A setting needs a Python module that is not installed."""

    def __init__(self, field: str, value: object, module: str | None, extra: str) -> None:
        """`extra`: the optional dependencies of the distribution `tokenlake` that install the module."""
        text = f"the module '{module}': pip install 'tokenlake[{extra}]'"
        super().__init__(field, value, text)
        self.args = (f"setting '{field}' needs {text}",)
