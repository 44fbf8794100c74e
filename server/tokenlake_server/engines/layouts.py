"""The layouts of a node's engines: those that have connected, and how many processes have each."""

from __future__ import annotations

from collections import Counter, OrderedDict

from tokenlake.metrics import OTHERS, Level, Metric
from tokenlake.opaque_layout import AnyLayout

MAX_LAYOUTS = 64
"""Limit of the layouts of each tenant that are remembered for schedulers."""

LAYOUT_PROCESSES = Metric(
    "tokenlake_layout_processes",
    "Connected processes of engines, by tenant and layout: the first eight digits of its fingerprint",
    "tenant",
    "layout",
    kind="gauge",
)


class EngineLayouts:
    """Layouts by tenant. Used on the control loop."""

    def __init__(self) -> None:
        self._known: dict[str, OrderedDict[bytes, AnyLayout]] = {}
        """The layouts by tenant and fingerprint."""
        self._processes: Counter[tuple[str, str]] = Counter()
        """Number of connected processes by tenant and layout (the first eight digits of its fingerprint), without the
        zeros."""

    def count(self, tenant: str, layout: AnyLayout, more: int) -> None:
        """Count `more` processes with the layout."""
        at = tenant, layout.fingerprint()[:4].hex()
        self._processes[at] += more
        if not self._processes[at]:
            del self._processes[at]

    def remember(self, tenant: str, layout: AnyLayout) -> None:
        """An engine with the layout has connected."""
        known = self._known.setdefault(tenant, OrderedDict())
        fingerprint = bytes(layout.fingerprint())
        known[fingerprint] = layout
        known.move_to_end(fingerprint)
        if len(known) > MAX_LAYOUTS:
            known.popitem(last=False)

    def of(self, tenant: str) -> list[AnyLayout]:
        """The layouts of the tenant's engines that have connected since the start, at most `MAX_LAYOUTS`, the newest
        last."""
        return list(self._known.get(tenant, {}).values())

    def sizes(self, tenant: str, weights_digest: str) -> list[int]:
        """The bytes of the segments of those of these engines that have this digest of their weights."""
        found = (each for each in self.of(tenant) if each.weights_digest == weights_digest)
        return list(dict.fromkeys(each.segment_bytes for each in found))

    def gauges(self) -> list[Level]:
        """The connected processes by tenant and layout, for the metrics page."""
        sums: Counter[tuple[str, str]] = Counter()
        layouts: Counter[str] = Counter()
        for (tenant, layout), count in self._processes.items():
            layouts[tenant] += 1
            sums[tenant, layout if layouts[tenant] <= MAX_LAYOUTS else OTHERS] += count
        return [Level(LAYOUT_PROCESSES, at, count) for at, count in sums.items()]
