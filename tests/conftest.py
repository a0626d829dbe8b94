import os
import random

from hypothesis import HealthCheck, settings
import pytest
import torch

from tests.helpers import Target, devices, targets

settings.register_profile(
    "ci",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=100,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.register_profile("explore", parent=settings.get_profile("ci"), derandomize=False, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(autouse=True)
def seed():
    """Every test starts from the same random state."""
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(params=devices())
def device(request) -> str:
    """Every device type that is present."""
    return request.param


@pytest.fixture(params=targets(), ids=str)
def target(request) -> Target:
    """Every device that is present, with every implementation registered for it and the reference."""
    return request.param
