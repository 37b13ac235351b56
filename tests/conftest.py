"""One thread: the tests' tensors are small, and threads that wait for busy cores cost minutes."""

import torch

torch.set_num_threads(1)
