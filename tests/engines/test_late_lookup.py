"""The lookup whose answer is late."""

from __future__ import annotations

import pytest

from tokenlake.errors import Unreachable
from tokenlake_client.engines.vllm.lookup import SILENT_S, LateLookup, PolledMatch


class Lookup(PolledMatch):
    """A lookup with the given results of `poll`; an error is raised."""

    def __init__(self, *polls: bool | Exception) -> None:
        super().__init__(None, 10.0, lambda: 0.0)
        self.polls = list(polls)
        self.drops = 0

    def poll(self) -> bool:
        found = self.polls.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    def drop(self) -> None:
        self.drops += 1


@pytest.mark.parametrize("last", [True, Unreachable("gone")])
def test_nothing_is_started_until_the_answer(last: bool | Exception) -> None:
    times = [10.0]
    late, first, second = LateLookup(lambda: times[0]), Lookup(False, last), Lookup()
    assert late.answered()
    late.give_up(first)
    late.give_up(second)
    assert (first.drops, second.drops) == (0, 1)
    assert not late.answered()
    silent = [late.silent]
    times[0] += SILENT_S + 0.1
    silent.append(late.silent)
    assert late.answered()
    assert first.drops == 1
    assert late.answered()
    assert [*silent, late.silent] == [False, True, False]


def test_an_unforeseen_error_ends_the_late_lookup() -> None:
    late, lookup = LateLookup(lambda: 0.0), Lookup(ValueError("unforeseen"))
    late.give_up(lookup)
    with pytest.raises(ValueError, match="unforeseen"):
        late.answered()
    assert lookup.drops == 1, "a lease would stay"
    assert late.answered()
