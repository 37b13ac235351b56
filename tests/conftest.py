"""One thread: the tests' tensors are small, and threads that wait for busy cores cost minutes."""

import os

import torch

torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # and in the processes that tests start
