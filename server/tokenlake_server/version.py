"""The version of this daemon, as other nodes and operators see it."""

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("tokenlake")
except PackageNotFoundError:  # the modules lie on the path, and nothing is installed
    VERSION = "unknown"
