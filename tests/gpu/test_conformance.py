"""What the backends on CUDA keep (`tests/backends/`), on the pretended GPU.

Not the compiler's, which has no GPU to write for; not what is about rounding alone; and for two
kinds of models: `test_tokens.py` has all.
"""

from dataclasses import replace

import pytest

from tests.backends.conformance import a_lane_does_not_care_who_shares_its_step, checks_of
from tests.backends.test_conformance import CUDA

BACKEND = replace(CUDA["cuda-graph"], kinds=("llama", "sliding"))
ROUNDING = a_lane_does_not_care_who_shares_its_step


@pytest.mark.parametrize("check", [check for check in checks_of(BACKEND) if check is not ROUNDING])
def test_captured_steps_conform(check, gpus):
    check(BACKEND)
