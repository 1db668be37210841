"""Settings of the whole suite. pytest puts this folder on the path, so tests can `import helpers`."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)

settings.register_profile(
    "suite",
    deadline=None,
    derandomize=True,  # the same examples every time: a failure is a change, not luck
    database=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("suite")
