"""Settings shared by every test."""

from __future__ import annotations

import os

from hypothesis import settings

# Fixed examples by default, so a red run is red again; HYPOTHESIS_PROFILE=explore looks further.
settings.register_profile("fixed", derandomize=True, deadline=None, max_examples=60)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))
