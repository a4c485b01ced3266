"""Settings for all tests; its being here also puts this folder on the path, for `paper_tables`."""

import torch

# Small tensors: a second thread gains nothing, and costs a lot where tests run beside each other.
torch.set_num_threads(1)
