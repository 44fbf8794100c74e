"""Stands in for SGLang's library of CPU kernels, which no package index has in a build for processors without AMX.
SGLang imports it, and then computes with torch. A kernel that is called nevertheless fails by name."""

from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*arguments: object, **options: object) -> None:
        raise NotImplementedError(f"sgl_kernel.{name}")

    missing.__name__ = name
    return missing
