"""Settings of hypothesis for all tests.

The default profile derives the random seed from the test, so that a run on the same code tries the same examples. The
examples change when the code changes, because hypothesis also draws constants that it finds in the loaded modules.
`pytest --hypothesis-profile=random` tries other examples in each run; `--hypothesis-seed=N` beside it repeats them, and
a failure prints the line that does so.
"""

from hypothesis import settings

settings.register_profile("tokenlake", derandomize=True, print_blob=True, deadline=None)
settings.register_profile("random", derandomize=False, database=None, print_blob=True, deadline=None)
settings.load_profile("tokenlake")
