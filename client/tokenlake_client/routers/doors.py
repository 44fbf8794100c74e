"""The control planes that a router asks. A thread in the background connects to them and reads the layouts of their
engines, so that no request waits for a connection; another one sends reports."""

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
from tokenlake.errors import DeadlinePassed, LayoutRefused, ProtocolRefused, Refused, TokenLakeError, Unreachable
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


class Door:
    """The connection to one control plane, and the layouts that it has reported."""

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
        self._late = 0
        """Number of the calls that were late since the last one that was not."""

    def look(self) -> None:
        """Connect if there is no connection, and read the layouts. Never raises."""
        try:
            if self._control is None:
                self._control = self._connect()
            self.layouts = tuple(_known(self._control.layouts()))
        except TokenLakeError as error:
            self.failed(error)
        else:
            self.usable = True

    def failed(self, error: Exception) -> None:
        """Record that a call failed: the control plane is not asked until a look succeeds."""
        self.problem = str(error) or "it did not answer in time"
        self.usable = False
        self._late = 0

    def late(self, error: DeadlinePassed) -> None:
        """Record that a call was late. One may be late because of its own request: the control plane is not asked any
        more after `LATE_CALLS` of them in a row."""
        self._late += 1
        if self._late >= LATE_CALLS:
            self.failed(error)

    def start(self, message: pb.GetStartRequest) -> pb.GetStartResponse:
        """Ask where a request starts soonest. Raises `Unreachable` and `Refused`."""
        control = self._control
        if control is None:
            raise Unreachable(f"{self.name}: not connected")
        reply = control.start(message)
        self._late = 0
        return reply

    def report(self, message: pb.ReportRequest) -> None:
        """Send reports. Raises `Unreachable` and `Refused`."""
        control = self._control
        if control is None:
            raise Unreachable(f"{self.name}: not connected")
        control.report(message)

    def close(self) -> None:
        """End the connection."""
        self.usable = False
        control, self._control = self._control, None
        if control is not None:
            control.close()


class _Report(NamedTuple):
    place: Place
    happened: pb.Happened


class Doors:
    """All control planes of the settings, and the reports to them. Thread-safe."""

    def __init__(self, settings: RouterSettings, changed: Callable[[Door], None] = lambda door: None) -> None:
        """Starts the threads. `changed`: called in a thread after a door began or ceased to be usable."""
        self._fleet = settings.fleet
        self._lookup_s = settings.deadline_ms / 1e3 / 2
        self._changed = changed
        self.doors = tuple(_doors_of(settings))
        self._reports: deque[_Report] = deque(maxlen=MAX_REPORTS)
        self._lock = threading.Lock()
        self._told: dict[Door, bool] = {}
        self._waiting = threading.Event()
        self._closed = threading.Event()
        self._doubt = threading.Event()
        """A call was late: look at the doors at once."""
        for work in (self._look, self._send):
            threading.Thread(target=work, name=f"tokenlake-router{work.__name__}", daemon=True).start()

    def find(self, weights: str | None) -> Place:
        """The first door that is usable and knows the layout of a model. `weights`: the weights digest of its engines,
        or the beginning; None: the engines of the pool have one model. Raises `Unreachable` without a usable door,
        `LayoutRefused` if none of them knows the layout; both messages name the reason."""
        reason = ""
        for door in self.doors:
            if not door.usable:
                continue
            known = door.layouts
            if weights is not None:
                found = [each for each in known if each[1].weights_digest.startswith(weights)]
            elif len({layout.weights_digest for _, layout in known}) <= 1:
                found = list(known)
            else:
                names = ", ".join(f"{each.model_id} {each.weights_digest[:12]}" for _, each in known)
                reason = reason or f"the pool has engines of several models ({names}), and the deployment names none"
                continue
            if found:
                fingerprint, layout = found[-1]
                return Place(door, layout, fingerprint)
            reason = reason or f"no engine of this model has connected to the daemon of {door.name}"
        if reason:
            raise LayoutRefused(reason)
        raise Unreachable("; ".join(f"{door.name}: {door.problem}" for door in self.doors))

    def start(
        self, place: Place, instances: Mapping[str, str], prompt: pb.Prompt, among: Sequence[str]
    ) -> pb.GetStartResponse:
        """Ask where a request starts soonest, and count it as sent there. `instances`: the node of each. Blocks for at
        most the deadline of the settings. Raises `Unreachable`, after which the door is not asked until it is usable
        again, and `Refused`. A door that is late is asked until a look finds that it answers no other question either,
        or until it was late for several requests in a row: one of them may take long by itself. After an error the
        daemon may have counted the request all the same."""
        message = pb.GetStartRequest(
            fleet=self._message(place, instances),
            prompt=prompt,
            among=among,
            send=True,
            deadline_s=self._lookup_s,
        )
        try:
            return place.door.start(message)
        except Unreachable as error:
            self._failed(place, error)
            raise

    def _failed(self, place: Place, error: Unreachable) -> None:
        """Record that a call failed: its door is not asked until a look in the background succeeds. A call that was
        late only begins that look."""
        if isinstance(error, DeadlinePassed):
            place.door.late(error)
            if place.door.usable:
                self._doubt.set()
        else:
            place.door.failed(error)
        self._tell(place.door)

    def _tell(self, door: Door) -> None:
        """Call `changed` if the control plane became usable or unusable since the last call of `changed` for it."""
        with self._lock:
            usable = door.usable
            if self._told.get(door) == usable:
                return
            self._told[door] = usable
        self._changed(door)

    def report(self, place: Place, happened: pb.Happened) -> None:
        """Queue a report to the daemon, which a background thread sends. Never blocks."""
        self._reports.append(_Report(place, happened))
        self._waiting.set()

    def close(self) -> None:
        """End the threads and the connections."""
        self._closed.set()
        self._waiting.set()
        self._doubt.set()

    # -- the threads

    def _look(self) -> None:
        while not self._closed.is_set():
            self._doubt.clear()
            for door in self.doors:
                door.look()
                self._tell(door)
            self._doubt.wait(REFRESH_S)
        for door in self.doors:
            door.close()

    def _send(self) -> None:
        while not self._closed.is_set():
            self._waiting.wait()
            self._waiting.clear()
            time.sleep(LINGER_S)
            late: list[_Report] = []
            while self._reports and not self._closed.is_set():
                batch = [self._reports.popleft() for _ in range(min(AT_ONCE, len(self._reports)))]
                late += self._send_batch(batch)
            self._reports.extendleft(reversed(late[-MAX_REPORTS:]))
            if late and not self._closed.wait(REFRESH_S):
                self._waiting.set()

    def _send_batch(self, batch: Sequence[_Report]) -> list[_Report]:
        """Send some reports. Returns those whose daemon cannot be reached now."""
        late: list[_Report] = []
        by_place: dict[tuple[int, bytes], list[_Report]] = {}
        for each in batch:
            by_place.setdefault((id(each.place.door), each.place.fingerprint), []).append(each)
        for reports in by_place.values():
            place = reports[0].place
            if not place.door.usable:
                late += reports
                continue
            message = pb.ReportRequest(fleet=self._message(place, {}), happened=[each.happened for each in reports])
            try:
                place.door.report(message)
            except Unreachable as error:
                self._failed(place, error)
                late += reports
            except (Refused, ProtocolRefused):
                # A daemon that was started again knows nothing of these requests.
                continue
        return late

    def _message(self, place: Place, instances: Mapping[str, str]) -> pb.Fleet:
        layout = place.layout
        return pb.Fleet(
            name=self._fleet,
            instances=instances,
            layers=layout.layers,
            segment_bytes=layout.segment_bytes,
            segment_tokens=layout.segment_tokens,
            # For plans only.
            query_bytes=1,
        )


def _known(listed: Sequence[pb.Layout]) -> Iterator[tuple[bytes, Layout]]:
    """The fingerprint and layout of the engines that this version knows, whose keys follow from tokens."""
    for each in listed:
        # During a rolling upgrade, engines of a newer version have layouts that this version cannot decode.
        with contextlib.suppress(LayoutRefused):
            if not each.opaque:
                yield each.fingerprint, Layout.decode(each.encoded)


def _doors_of(settings: RouterSettings) -> list[Door]:
    """The doors of the settings, without a connection."""
    call_s = settings.deadline_ms / 1e3
    doors = []
    for at in settings.control or _default_controls():
        if isinstance(at, Peer):
            files = Certificates(Path(settings.certificate), Path(settings.key), Path(settings.ca))
            address = str(Address(at.host, at.port))
            connect = partial(Control.connect, address, at.name, files, settings.credential, call_s=call_s)
        else:
            connect = partial(Control.local, at, settings.credential, daemon_uid=settings.daemon_uid, call_s=call_s)
        doors.append(Door(str(at), connect))
    return doors


def _default_controls() -> list[str]:
    """The control sockets of a daemon with the default name, of this user and of the system."""
    sockets = sockets_to_try(os.environ, DEFAULT_NODE, os.getuid())
    return [socket.removesuffix(".sock") + ".control" for socket in sockets]
