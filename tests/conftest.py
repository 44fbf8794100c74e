"""For all tests: hypothesis tries the same examples everywhere and prints how to repeat a failure, and a failed assert
of a helper module shows its values, as one of a test module does."""

from pathlib import Path

import pytest
from hypothesis import settings

# Before any of them is imported. pytest itself rewrites the asserts of test modules and conftests alone.
pytest.register_assert_rewrite(*(f"tests.{each.name}" for each in Path(__file__).parent.iterdir() if each.is_dir()))

settings.register_profile("tokenlake", derandomize=True, print_blob=True, deadline=None)
settings.load_profile("tokenlake")
