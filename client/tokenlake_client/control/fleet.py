"""A router of single requests, over the control plane: the daemon keeps the requests under way of a fleet, so that
several routers of the fleet share them.

::

    start = router.where(request, send=True)
    router.first_token(request.name)
    router.finished(request.name)        # also when the request failed, or its client went away
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tokenlake.identity import NodeId
from tokenlake.planner import Model, Request, Start
from tokenlake_client.control.client import Control
from tokenlake_client.control.messages import fleet_message, prompt_message, start_message, start_of
from tokenlake_proto.v1 import scheduling_pb2 as pb


class FleetRouter:
    """The requests of one fleet. Every method raises as `Control` does. The caller keeps the ownership of the
    control."""

    def __init__(
        self,
        control: Control,
        instances: Mapping[str, NodeId],
        model: Model,
        segment_tokens: int,
        name: str = "default",
    ) -> None:
        """`instances`: the node of each instance, by name. `name`: of the fleet; routers with the same name share their
        requests under way."""
        self._control = control
        self._model = model
        self._segment_tokens = segment_tokens
        self._name = name
        self.instances = dict(instances)

    def message(self) -> pb.Fleet:
        """The fleet as a message."""
        return fleet_message(self._name, self.instances, self._model, self._segment_tokens)

    def where(self, request: Request, among: Iterable[str] | None = None, *, send: bool = False) -> Start:
        """The instance where the request starts soonest, by where its prefix is cached and by what waits at the
        instances. `among`: those to choose from (default: all). `send`: count the request as sent there."""
        message = pb.GetStartRequest(
            fleet=self.message(), prompt=prompt_message(request), among=list(among or ()), send=send
        )
        return start_of(self._control.start(message).chosen)

    def sent(self, request: Request, start: Start) -> None:
        """Record that the request was sent to `start.instance`."""
        self.report(pb.Happened(sent=pb.Sent(prompt=prompt_message(request), start=start_message(start))))

    def first_token(self, name: str) -> None:
        """Record that the prefill of the request `name` is done."""
        self.report(pb.Happened(first_token=name))

    def finished(self, name: str) -> None:
        """Record that the request `name` was answered or has failed."""
        self.report(pb.Happened(finished=name))

    def prefilled(self, new: int, prefix: int, seconds: float) -> None:
        """Record that a prefill of `new` tokens behind `prefix` cached ones, which ran alone, took `seconds`."""
        self.report(pb.Happened(prefilled=pb.Prefilled(new_tokens=new, prefix_tokens=prefix, seconds=seconds)))

    def join(self, instance: str, node: NodeId) -> None:
        """Add a new or restarted instance, at which no request is under way."""
        self.leave(instance)
        self.instances[instance] = node

    def leave(self, instance: str) -> None:
        """Remove an instance that is gone, with its requests."""
        self.instances.pop(instance, None)
        self.report(pb.Happened(gone=instance))

    def report(self, *happened: pb.Happened) -> int:
        """Tell what happened, in one call. Returns the number of requests under way in the fleet."""
        return self._control.report(pb.ReportRequest(fleet=self.message(), happened=happened))
