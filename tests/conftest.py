"""One thread: the tiny models of the tests are slower with more, and CI machines differ."""

import torch

torch.set_num_threads(1)
