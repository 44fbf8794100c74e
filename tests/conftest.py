"""What all tests share: hypothesis tries the same examples everywhere and prints how to repeat a failure."""

from hypothesis import settings

settings.register_profile("tokenlake", derandomize=True, print_blob=True, deadline=None)
settings.load_profile("tokenlake")
