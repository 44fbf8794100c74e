"""The rules of one node as a state machine: events in, instructions out.

A driver (the daemon, the simulator, a test, a replay) owns one `NodeCore` and everything that the rules do not touch:
sockets, threads, the clock, bytes. Its duties:

1. Call `start(now)` once, before the first event. `now` is in seconds of any clock that never goes back.
2. Pass in one event at a time (`handle(event, now)`), each with the time at which it happened, from one thread. Events
   of one connection keep their order.
3. Carry out the returned instructions in their order, before the next event is passed in. An instruction is an order
   and not a question: `CutRegion`, `Record` and `Stamp` come first and must be done before a slot is named to anyone.
4. Pass in `Tick` when the time of `next_wake()` has come; each `Tick` fires one timer. A driver that was late passes in
   the events that arrived meanwhile first, so that its own delay makes no peer overdue.
5. End each `StartFetch`, `DiskRead`, `DiskWrite`, `DiskErase`, `ColdRead`, `ColdWrite`, `SendBulk` and `CheckSlot` with
   one event, whatever the outcome, also after the order to abort it: slots and places stay pinned until then. Answer
   each `ColdLook` at once.
6. Report each connection once as `Joined` and once as `ProcessGone`, and only when no code of the process can touch
   shared memory any more: that event frees slots that it could write into.
7. Report a peer as `PeerUp` with its incarnation before its first message, and as `PeerDown` once its connection broke.
8. Pass in a message only after its decoder accepted it. An event that the rules refuse raises `ValueError` and changed
   nothing: end the connection of its sender.
9. On `HandlerFailed` (a mistake of the rules) carry out its `instructions`, report it, and go on.

A state depends on the events and their times alone: equal events give equal instructions in every process.
"""

from tokenlake.core.context import CoreConfig
from tokenlake.core.node import NodeCore

__all__ = ["CoreConfig", "NodeCore"]
