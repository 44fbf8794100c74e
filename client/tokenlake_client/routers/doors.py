"""The control planes that a router asks. A thread in the background connects to them, reads the layouts of their
engines and sends reports, so that no request waits for a connection."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tokenlake.config import Address, Peer
from tokenlake.errors import DeadlinePassed, LayoutRefused, Refused, TokenLakeError, Unreachable
from tokenlake.layout import Layout
from tokenlake.wire.local_socket import DEFAULT_NODE, sockets_to_try
from tokenlake_client.control import Certificates, Control
from tokenlake_client.routers.settings import RouterSettings
from tokenlake_proto.v1 import scheduling_pb2 as pb

REFRESH_S = 1.0
"""Seconds between two looks at each control plane, and least seconds for which one is not asked after a failure."""
LATE_CALLS = 4
"""Calls in a row that are late before a control plane is not asked any more."""
MAX_REPORTS = 8192
"""Reports that wait to be sent; the oldest are dropped. The daemon forgets a request by itself after 15 minutes."""
AT_ONCE = 2048
"""Reports of one message; a daemon accepts twice as many."""
LINGER_S = 0.005
"""Seconds for which reports are collected before they are sent."""


class Place(NamedTuple):
    """A control plane that answers and knows the layout of a model's engines."""

    door: Door
    layout: Layout
    fingerprint: bytes

    def fleet(self, name: str, instances: Mapping[str, str] = {}) -> pb.Fleet:
        """The fleet `name` of this model. `instances`: the node of each."""
        return pb.Fleet(
            name=name,
            instances=instances,
            layers=self.layout.layers,
            segment_bytes=self.layout.segment_bytes,
            segment_tokens=self.layout.segment_tokens,
            # For plans only.
            query_bytes=1,
        )


class Door:
    """The connection to one control plane, the layouts that it has reported, and the reports that wait for it."""

    def __init__(self, name: str, connect: Callable[[], Control]) -> None:
        """`name`: for the log. `connect`: opens a connection, which this object then owns."""
        self.name = name
        self._connect = connect
        self._control: Control | None = None
        self.layouts: tuple[tuple[bytes, Layout], ...] = ()
        """Fingerprint and layout of the engines whose keys follow from tokens, the newest last."""
        self.usable = False
        """True if the layouts were read with success and no call has failed since."""
        self.problem = "it was not asked yet"
        self.reports: deque[tuple[Place, pb.Happened]] = deque(maxlen=MAX_REPORTS)
        self._late = 0
        """Number of the calls that were late since the last one that was not."""

    @property
    def control(self) -> Control:
        """The connection. Raises `Unreachable` where there is none."""
        if self._control is None:
            raise Unreachable(f"{self.name}: not connected")
        return self._control

    def look(self) -> None:
        """Connect if there is no connection, and read the layouts. Never raises."""
        try:
            if self._control is None:
                self._control = self._connect()
            self.layouts = tuple(_known(self._control.layouts()))
        except TokenLakeError as error:
            self.usable = False
            self.failed(error)
        else:
            self.usable = True

    def failed(self, error: Exception) -> None:
        """Record that a call failed: the control plane is not asked until a look succeeds. One call may be late because
        of its own request: only `LATE_CALLS` of them in a row are a failure."""
        self._late += isinstance(error, DeadlinePassed) and self.usable
        if not isinstance(error, DeadlinePassed) or self._late >= LATE_CALLS or not self.usable:
            self.problem = str(error) or "it did not answer in time"
            self.usable, self._late = False, 0

    def start(self, message: pb.GetStartRequest) -> pb.GetStartResponse:
        """Ask where a request starts soonest. Raises `Unreachable` and `Refused`."""
        reply = self.control.start(message)
        self._late = 0
        return reply

    def send(self, fleet: str) -> None:
        """Send the reports that wait. Raises `Unreachable`; reports that were not sent wait further."""
        while self.reports:
            place = self.reports[0][0]
            batch: list[pb.Happened] = []
            while self.reports and len(batch) < AT_ONCE and self.reports[0][0].fingerprint == place.fingerprint:
                batch.append(self.reports.popleft()[1])
            try:
                # A daemon that was started again knows nothing of these requests, and refuses their reports.
                with contextlib.suppress(Refused):
                    self.control.report(pb.ReportRequest(fleet=place.fleet(fleet), happened=batch))
            except Unreachable:
                self.reports.extendleft((place, each) for each in reversed(batch))
                raise

    def close(self) -> None:
        """End the connection."""
        self.usable = False
        control, self._control = self._control, None
        if control is not None:
            control.close()


class Doors:
    """All control planes of the settings, and the reports to them. Thread-safe."""

    def __init__(self, settings: RouterSettings, changed: Callable[[Door], None] = lambda door: None) -> None:
        """Starts the thread. `changed`: called in any thread after a door began or ceased to be usable."""
        self._fleet = settings.fleet
        self._lookup_s = settings.deadline_ms / 1e3 / 2
        self._changed = changed
        self.doors = tuple(_doors_of(settings))
        self._lock = threading.Lock()
        self._told: dict[Door, bool] = {}
        self._wake = threading.Event()
        """Set when reports wait, a call failed, or the doors close."""
        self._closed = False
        self._doubt = True
        """True: look at the doors at once."""
        threading.Thread(target=self._run, name="tokenlake-router", daemon=True).start()

    def find(self, weights: str | None) -> Place:
        """The first door that is usable and knows the layout of a model. `weights`: the weights digest of its engines,
        or the beginning; None: the engines of the pool have one model. Raises `Unreachable` without a usable door,
        `LayoutRefused` if none of them knows the layout; both messages name the reason."""
        reason = ""
        for door in self.doors:
            if not door.usable:
                continue
            known = door.layouts
            if weights is None and len({layout.weights_digest for _, layout in known}) > 1:
                names = ", ".join(f"{each.model_id} {each.weights_digest[:12]}" for _, each in known)
                reason = reason or f"the pool has engines of several models ({names}), and the deployment names none"
                continue
            found = [each for each in known if each[1].weights_digest.startswith(weights or "")]
            if found:
                fingerprint, layout = found[-1]
                return Place(door, layout, fingerprint)
            reason = reason or f"no engine of this model has connected to the daemon of {door.name}"
        if reason:
            raise LayoutRefused(reason)
        raise Unreachable("; ".join(f"{door.name}: {door.problem}" for door in self.doors))

    def start(self, place: Place, instances: Mapping[str, str], prompt: pb.Prompt) -> pb.GetStartResponse:
        """Ask at which of the `instances` a request starts soonest, and count it as sent there. `instances`: the node
        of each. Blocks for at most the deadline of the settings. Raises `Unreachable`, after which the door is not
        asked until it is usable again, and `Refused`. A door that is late is asked until a look finds that it answers
        no other question either, or until it was late for several requests in a row: one of them may take long by
        itself. After an error the daemon may have counted the request all the same."""
        message = pb.GetStartRequest(
            fleet=place.fleet(self._fleet, instances),
            prompt=prompt,
            among=list(instances),
            send=True,
            deadline_s=self._lookup_s,
        )
        try:
            return place.door.start(message)
        except Unreachable as error:
            self._failed(place.door, error)
            raise

    def report(self, place: Place, happened: pb.Happened) -> None:
        """Queue a report to the daemon, which the thread sends. Never blocks."""
        place.door.reports.append((place, happened))
        self._wake.set()

    def close(self) -> None:
        """End the thread and the connections."""
        self._closed = True
        self._wake.set()

    # -- inside

    def _failed(self, door: Door, error: Unreachable) -> None:
        door.failed(error)
        self._tell(door)
        if door.usable:
            self._doubt = True
            self._wake.set()

    def _tell(self, door: Door) -> None:
        """Call `changed` if the control plane became usable or unusable since the last call of `changed` for it."""
        with self._lock:
            usable = door.usable
            if self._told.get(door) == usable:
                return
            self._told[door] = usable
        self._changed(door)

    def _run(self) -> None:
        look_at = 0.0
        while not self._closed:
            if self._doubt or time.monotonic() >= look_at:
                self._doubt = False
                for door in self.doors:
                    door.look()
                    self._tell(door)
                look_at = time.monotonic() + REFRESH_S
            for door in self.doors:
                try:
                    if door.usable:
                        door.send(self._fleet)
                except TokenLakeError as error:
                    door.failed(error)
                    self._tell(door)
            if self._wake.wait(max(0.0, look_at - time.monotonic())):
                self._wake.clear()
                time.sleep(LINGER_S)
        for door in self.doors:
            door.close()


def _known(listed: Sequence[pb.Layout]) -> Iterator[tuple[bytes, Layout]]:
    """The fingerprint and layout of the engines that this version knows, whose keys follow from tokens."""
    for each in listed:
        # During a rolling upgrade, engines of a newer version have layouts that this version cannot decode.
        with contextlib.suppress(LayoutRefused):
            if not each.opaque:
                yield each.fingerprint, Layout.decode(each.encoded)


def _doors_of(settings: RouterSettings) -> Iterator[Door]:
    """The doors of the settings, without a connection."""
    call_s = settings.deadline_ms / 1e3
    # Without a setting, the control sockets of a daemon with the default name, of this user and of the system.
    sockets = sockets_to_try(os.environ, DEFAULT_NODE, os.getuid())
    for at in settings.control or [socket.removesuffix(".sock") + ".control" for socket in sockets]:
        if isinstance(at, Peer):
            files = Certificates(Path(settings.certificate), Path(settings.key), Path(settings.ca))
            address = str(Address(at.host, at.port))
            connect = partial(Control.connect, address, at.name, files, settings.credential, call_s=call_s)
        else:
            connect = partial(Control.local, at, settings.credential, daemon_uid=settings.daemon_uid, call_s=call_s)
        yield Door(str(at), connect)
