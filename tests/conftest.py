"""Shared set-up: kernels run in Triton's interpreter where there is no GPU, and nothing reaches for a model hub."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel module is first imported
os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch.set_num_threads(1)  # the operations are small, and tests run beside each other
