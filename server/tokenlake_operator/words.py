"""Texts for people of amounts of bytes, rates, shares and times."""

from __future__ import annotations


def amount(nbytes: float) -> str:
    """Bytes in the largest binary unit of which there is at least one: `3.2 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" or nbytes >= 100 else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def per_second(nbytes: float) -> str:
    """A rate of bytes."""
    return f"{amount(nbytes)}/s"


def share(part: float, whole: float) -> str:
    """A part of a whole in percent; `-` of nothing."""
    return f"{100 * part / whole:.1f} %" if whole else "-"


def span(seconds: float) -> str:
    """A time in the unit that fits: `340 us`, `12.5 ms`, `3.1 s`, `4 min`, `2 h`, `3 d`."""
    if seconds < 0.9995e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 0.99995:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 119.95:
        return f"{seconds:.1f} s"
    for limit, unit, size in ((7200, "min", 60), (172_800, "h", 3600)):
        if seconds < limit:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86_400:.0f} d"
