"""Settings for all tests.

The default profile of hypothesis derives the random seed from the test, so that a run on the same code tries the same
examples. The examples change when the code changes, because hypothesis also draws constants that it finds in the loaded
modules. `pytest --hypothesis-profile=random` tries other examples in each run; `--hypothesis-seed=N` beside it repeats
them, and a failure prints the line that does so.

A failed assert of a helper module shows its values, as one of a test module does.
"""

from pathlib import Path

import pytest
from hypothesis import settings

# Before any of them is imported. pytest itself rewrites the asserts of test modules and conftests alone.
pytest.register_assert_rewrite(*(f"tests.{each.name}" for each in Path(__file__).parent.iterdir() if each.is_dir()))

settings.register_profile("tokenlake", derandomize=True, print_blob=True, deadline=None)
settings.register_profile("random", derandomize=False, database=None, print_blob=True, deadline=None)
settings.load_profile("tokenlake")
