"""The choice for one request, and the requests under way of this process. Imports no router."""

from __future__ import annotations

import asyncio
import enum
import logging
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from tokenlake.errors import DeadlinePassed, LayoutRefused, TokenLakeError, Unreachable
from tokenlake_client.routers.doors import Door, Doors, Place
from tokenlake_client.routers.settings import RouterSettings
from tokenlake_client.routers.tokens import Instance, LocalTokenizer, Prompt, RemoteTokenizer, TokenizerFailed, Tokens
from tokenlake_proto.v1 import scheduling_pb2 as pb

MAX_TOKENS = 1 << 18
"""The daemon's limit of the tokens of a prompt. The rest of a longer prompt changes no choice and is not sent."""
MAX_UNDER_WAY = 8192
"""Limit of the requests under way that are remembered; beyond it the oldest count as finished."""
THREADS = 16
"""Limit of the calls of the pool at a time. Each takes about a millisecond, and at most the deadline."""
MAX_LOGGED = 64
"""Limit of the distinct problems that are logged."""

log = logging.getLogger("tokenlake.router")


class Outcome(enum.StrEnum):
    """The end of one choice."""

    CHOSEN = "chosen"
    """The pool chose the instance."""
    NO_CHOICE = "no_choice"
    """The router offered one instance only."""
    NOT_SERVED = "not_served"
    """The request or its deployments cannot be served; the log names the reason."""
    UNREACHABLE = "unreachable"
    """No control plane could be asked at that time, or the one that was asked went away. The request did not wait."""
    LATE = "late"
    """The deadline passed."""
    REFUSED = "refused"
    """The pool refused the question; the log names the reason."""
    NO_TOKENS = "no_tokens"
    """The tokenizer failed; the log names the reason."""
    UNKNOWN = "unknown"
    """The pool named an instance that was not asked for."""
    FAILED = "failed"
    """An error of the plug-in; the log has it."""


class Candidate(NamedTuple):
    """An instance that may get the request."""

    instance: Instance
    node: str
    """The node of the pool to whose daemon it is connected."""


class Choice(NamedTuple):
    """The instance of a request. With `CHOSEN` it is one of those that were asked for."""

    outcome: Outcome
    instance: str = ""
    """The address of the instance."""
    start: pb.Start = pb.Start()
    tokens: int = 0
    """Tokens of the prompt."""


class _UnderWay(NamedTuple):
    name: str
    """The request's name at the daemon: unique for each attempt."""
    place: Place
    tokens: int


class Chooser:
    """Asks the pool for instances, and tells it of the requests' first tokens and ends. Its methods are called on one
    event loop; none of them raises an error of the pool."""

    def __init__(self, settings: RouterSettings) -> None:
        """Starts to connect in the background."""
        self._settings = settings
        self._deadline_s = settings.deadline_ms / 1e3
        self._tokens: Tokens = LocalTokenizer(settings.tokenizer) if settings.tokenizer else RemoteTokenizer()
        self._doors = Doors(settings, self._door_changed)
        self._calls = ThreadPoolExecutor(THREADS, thread_name_prefix="tokenlake-router")
        self._under_way: OrderedDict[str, _UnderWay] = OrderedDict()
        """By the router's name of the request."""
        self._attempts = 0
        self._logged: set[str] = set()

    async def choose(
        self, request: str, prompt: Prompt, candidates: Sequence[Candidate], weights: str | None, salt: str | None
    ) -> Choice:
        """The instance where a request starts soonest, within the deadline of the settings. The request counts as sent
        there. `request`: the router's name of it; an earlier attempt of the same name counts as finished. `weights`:
        as of `Doors.find`. `salt`: the request's `cache_salt`."""
        self.finished(request)
        try:
            place = self._doors.find(weights)
        except LayoutRefused as error:
            return self._refusal(Outcome.NOT_SERVED, str(error))
        except Unreachable:
            return Choice(Outcome.UNREACHABLE)
        self._attempts += 1
        name = f"{request[:200]}#{self._attempts}"
        instances = {each.instance.base: each.node for each in candidates}
        call: Future[pb.GetStartResponse] | None = None
        kept = False
        try:
            until = asyncio.get_running_loop().time() + self._deadline_s
            ids = await self._tokens.tokens(prompt, [each.instance for each in candidates], until)
            message = pb.Prompt(
                name=name,
                tokens=len(ids) // 4,
                token_ids=ids[: 4 * MAX_TOKENS],
                fingerprint=place.fingerprint,
                salt=self._settings.salt,
                request_salt=salt,
            )
            async with asyncio.timeout_at(until):
                call = self._calls.submit(self._doors.start, place, instances, message, list(instances))
                chosen = (await asyncio.wrap_future(call)).chosen
            if chosen.instance not in instances:
                reason = f"{place.door.name} named the unknown instance {chosen.instance!r}"
                return self._refusal(Outcome.UNKNOWN, reason)
            kept = True
        except TimeoutError:
            return self._refusal(
                Outcome.LATE if call else Outcome.NO_TOKENS,
                f"{'the pool' if call else 'the tokenizer'} did not answer within {self._settings.deadline_ms:g} ms",
            )
        except TokenizerFailed as error:
            return self._refusal(Outcome.NO_TOKENS, f"no tokens: {error}")
        except RuntimeError as error:
            # No thread can be started. The executor has queued the call all the same.
            self._doors.report(place, pb.Happened(finished=name))
            return self._refusal(Outcome.REFUSED, str(error))
        except Unreachable as error:
            return Choice(Outcome.LATE if isinstance(error, DeadlinePassed) else Outcome.UNREACHABLE)
        except TokenLakeError as error:
            return self._refusal(Outcome.REFUSED, str(error))
        finally:
            if call is not None and not kept:
                # The daemon may have counted the request as sent, or may do so as long as the call lasts: also where
                # this wait was cancelled, because the client went away.
                call.add_done_callback(lambda _: self._doors.report(place, pb.Happened(finished=name)))
        self._under_way[request] = _UnderWay(name, place, len(ids) // 4)
        if len(self._under_way) > MAX_UNDER_WAY:
            self.finished(next(iter(self._under_way)))
        return Choice(Outcome.CHOSEN, chosen.instance, chosen, len(ids) // 4)

    def first_token(self, request: str) -> None:
        """The prefill of a request is done. Ignored for a request that is not under way."""
        under_way = self._under_way.get(request)
        if under_way is not None:
            self._doors.report(under_way.place, pb.Happened(first_token=under_way.name))

    def finished(self, request: str, answer_tokens: int = 0) -> int | None:
        """A request was answered, failed or was given up. Ignored for a request that is not under way.
        `answer_tokens`: tokens of a complete answer. Returns the tokens of its prompt."""
        under_way = self._under_way.pop(request, None)
        if under_way is None:
            return None
        self._doors.report(under_way.place, pb.Happened(finished=under_way.name))
        if answer_tokens > 0:
            self._doors.report(under_way.place, pb.Happened(answered_tokens=answer_tokens))
        return under_way.tokens

    def problem(self, message: str) -> None:
        """Log a problem that an operator can cure, once."""
        if message not in self._logged and len(self._logged) < MAX_LOGGED:
            self._logged.add(message)
            log.warning("TokenLake: the router's own strategy is used: %s", message)

    async def close(self) -> None:
        """End the connections and threads."""
        self._doors.close()
        await self._tokens.close()
        self._calls.shutdown(wait=False)

    def _refusal(self, outcome: Outcome, reason: str) -> Choice:
        self.problem(reason)
        return Choice(outcome)

    def _door_changed(self, door: Door) -> None:
        if door.usable:
            log.warning("TokenLake: %s is asked where requests start soonest", door.name)
        else:
            log.warning("TokenLake: %s is not asked: %s", door.name, door.problem)
