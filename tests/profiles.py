"""The profiles of hypothesis: which examples a search tries, and how many.

`tokenlake`, the default, with 40 % of the examples that a test names: the random seed is derived from the test, so that
each run tries the same examples. hypothesis would also draw constants that it finds in the modules that are loaded,
which are others in each worker, and after each change of the code; it has no setting for that, so `register_profiles`
makes it find none.

`nightly`, of `make nightly`: as `tokenlake`, with three times the examples that a test names.

`random`: other examples in each run, as many as a test names. `--hypothesis-seed=N` beside it repeats them, and a
failure prints the line that does so.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis.internal.conjecture import providers

WHOLE = 100
"""Examples of a test that names no number, in the profile `random`."""
SHORT = 40
"""The same in the default profile."""
LONG = 300
"""The same in the profile `nightly`."""


def register_profiles() -> None:
    """Register the profiles, and load the default one. `--hypothesis-profile` then replaces it, before any test module
    is imported."""
    assert "is_local_module_file" in vars(providers)
    vars(providers)["is_local_module_file"] = lambda path: False
    common = settings(max_examples=WHOLE, print_blob=True, deadline=None)
    settings.register_profile("tokenlake", common, derandomize=True, max_examples=SHORT)
    settings.register_profile("random", common, derandomize=False, database=None)
    settings.register_profile("nightly", common, derandomize=True, max_examples=LONG)
    settings.load_profile("tokenlake")


def examples(number: int) -> int:
    """The number of examples of a search that names `number`, in this profile."""
    return number * settings().max_examples // WHOLE
