"""What the backends on CUDA keep (`tests/backends/`), on the pretended GPU.

Not the compiler's, which has no GPU to write for; and not what is about rounding alone.
"""

import pytest

from tests.backends.conformance import a_lane_does_not_care_who_shares_its_step, checks_of
from tests.backends.test_conformance import CUDA

ROUNDING = a_lane_does_not_care_who_shares_its_step


@pytest.mark.parametrize(
    "check", [check for check in checks_of(CUDA["cuda-graph"]) if check is not ROUNDING]
)
def test_captured_steps_conform(check, gpus):
    check(CUDA["cuda-graph"])
