"""Faults of another node, which is node 1; the engine of node 0 asks."""

from __future__ import annotations

from tests.robustness.live import Prompt, flip, wait_told, wait_until
from tests.robustness.matrix.measure import Outcome, asking
from tests.robustness.matrix.proxy import Cut, Direction, Drop, Flip, Trickle
from tests.robustness.matrix.world import World, world
from tokenlake.wire import Code

TRANSFERS = 'tokenlake_map_entries{map="transfers"}'
DIRECTIONS: tuple[Direction, ...] = ("down", "up")


def killed(seed: int) -> Outcome:
    """The engine reads and stores; the node starts again."""
    with world(seed) as at:
        only_there = at.fill_partly_at(1)
        at.begin()
        with asking(at.engines[:1], at.read_and_store) as wait:
            wait(3)
            at.nodes[1].kill()
            wait(len(at.prompts))
            at.nodes[1].start()
            at.cluster.wait_ready()
        wait_until(at.engines[1].answered, "its engine is back")
        at.ends(may_lose=only_there)
    return at.outcome


def stopped(seed: int) -> Outcome:
    """The engine reads and stores while the node is stopped, and after it continues."""
    with world(seed) as at:
        at.fill_partly_at(1)
        at.begin()
        with asking(at.engines[:1], at.read_and_store) as wait:
            wait(3)
            at.nodes[1].freeze()
            wait(len(at.prompts))
            at.nodes[1].thaw()
            wait_until(at.engines[1].answered, "it answers")
        at.ends()
    return at.outcome


def slow(seed: int) -> Outcome:
    """The messages and bytes that the node sends trickle."""
    with world(seed, linked=True) as at:
        at.fill()
        at.begin()
        with asking(at.engines[:1], at.fetch) as wait:
            wait(2)
            at.links[1].fault = Trickle("down", 64)
            wait(10)
            at.links[1].fault = None
        at.ends()
    return at.outcome


def cut(seed: int, fault: Cut) -> Outcome:
    """Five times a connection between the nodes ends within this part."""
    with world(seed, linked=True) as at:
        at.fill()
        at.begin()
        with asking(at.engines[:1], at.fetch):
            for made in range(1, 6):
                at.links[1].fault = fault
                wait_until(lambda made=made: at.links[1].done == made, "a connection is cut")  # type: ignore[misc]
        at.cluster.wait_ready()
        at.ends()
    return at.outcome


def full(seed: int) -> Outcome:
    """An engine of the node has leased all its slots: the node serves what it has and takes nothing."""
    with world(seed, memory="1MiB", session_lease_share="1") as at:
        mine, other = at.engines
        stored: list[Prompt] = []
        while at.metric(1, "tokenlake_free_slots"):
            stored.append(at.fresh(len(stored)))
            assert other.store(stored[-1], patience=5.0) == {Code.COMMITTED}
        wait_told(at.cluster)
        keys = [key for prompt in stored for key in other.pool.prefix(prompt.tokens).keys]
        leases = [other.pool.match([key]) for key in keys]
        assert sum(lease.hits for lease in leases) == at.metric(1, "tokenlake_slots")
        further = at.engine(1, "further engine of node1")
        at.begin()
        for prompt in at.prompts[:6]:
            assert mine.store(prompt, patience=5.0) == {Code.COMMITTED}
        wait_told(at.cluster)
        at.before = {bytes(key) for prompt in at.prompts[:6] for key in mine.pool.prefix(prompt.tokens).keys}
        assert further.store(at.prompts[6]) == {Code.NO_SLOT}
        assert [further.read(prompt) for prompt in at.prompts[:6]] == [0] * 6, "it has no slot for what it fetches"
        assert further.whole(stored[1:]), "what it has is read there"
        wait_until(lambda: mine.whole(stored[1:4]), "and at the other node")
        at.find_again(mine)
        assert at.metric(1, "tokenlake_received_segments_total") == 0, "the node took no segment"
        for lease in leases:
            lease.release()
        assert other.answered()
        assert further.whole(at.prompts[:6]), "released slots are given again"
        at.serves()
    return at.outcome


def _dead(at: World) -> bool:
    """Node 0 takes the bulk path to node 1 for dead. On a busy machine it may do so before the fault, too."""
    log = at.nodes[0].log.read_text()
    return log.count("delivers nothing") > log.count("delivers segments again")


def dropped(seed: int, drops: tuple[Drop, ...]) -> Outcome:
    """Some bytes do not pass on bulk connections to the node, one fault after the other; its control connection goes
    on."""
    with world(seed, linked=True) as at:
        at.fill()
        at.begin()
        unanswered, received = "tokenlake_unanswered_fetches_total", "tokenlake_received_segments_total"
        with asking(at.engines[:1], at.fetch) as wait:
            for drop in drops:
                wait(2)
                at.links[1].fault = drop
                wait_until(
                    lambda: not at.nodes[0].metrics()[TRANSFERS] and _dead(at),
                    "each transfer that began before has ended, and the bulk path counts as dead",
                )
                noticed = at.metric(0, unanswered)
                wait(20)
                assert at.metric(0, unanswered) == noticed, "no further fetch waits for the node"
                before_repair = at.metric(0, received)
                at.links[1].fault = None
                at.find_again()
                wait_until(lambda least=before_repair: at.metric(0, received) > least, "bytes arrive again")  # type: ignore[misc]
        assert at.metric(0, "tokenlake_suspected_peers_total") == 0
        at.ends()
    return at.outcome


def flipped_in_arena(seed: int) -> Outcome:
    """A bit flips in every segment of the node. The segments are computed again and served, also by this node."""
    with world(seed) as at:
        only_there = at.fill_partly_at(1)
        mine, other = at.engines
        flipped = [flip(other.pool, key) for prompt in at.prompts for key in other.pool.prefix(prompt.tokens).keys]
        assert sum(flipped) >= only_there > 0
        at.begin()
        for prompt in at.prompts:
            mine.read(prompt)
        corrupt = at.metric(0, "tokenlake_corrupt_segments_total")
        assert corrupt >= only_there
        wait_until(lambda: at.metric(1, "tokenlake_confirmed_segments_total") == corrupt, "all were checked")
        alone = at.prompts[: len(at.prompts) // 2]
        assert [other.read(prompt) for prompt in alone] == [0] * len(alone), "its own engine misses as well"
        at.find_again(mine, may_lose=only_there)
        for prompt in at.prompts:
            mine.store(prompt)
        assert mine.whole(at.prompts), "recomputed"
        wait_until(lambda: other.whole(alone), "also read at the node")
        at.serves()
    return at.outcome


def flipped_on_wire(seed: int) -> Outcome:
    """A bit flips in every second piece of a segment between the nodes, then in one of four frames from the node, then
    in one of four frames to the node."""
    with world(seed, linked=True) as at:
        at.fill()
        at.begin()
        with asking(at.engines[:1], at.fetch) as wait:
            at.links[1].fault = Flip("down", "raw", 2)
            wait_until(lambda: at.metric(0, "tokenlake_corrupt_segments_total") >= 5, "five segments are refused")
            for direction in DIRECTIONS:
                at.links[1].fault = Flip(direction, "body", 4)
                wait(20)
            at.links[1].fault = None
        at.ends()
    return at.outcome
