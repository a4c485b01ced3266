"""Settings for all tests; its being here also puts this folder on the path, for `paper_tables`."""

import os

import torch
from hypothesis import settings

# Small tensors: a second thread gains nothing, and costs a lot where tests run beside each other.
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))

# The same examples in every run: a test that fails, fails for everyone.
settings.register_profile("recast", derandomize=True, deadline=None)
settings.load_profile("recast")
