"""One thread and no network for every test: tiny models gain nothing from two threads and lose much on a busy machine."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import torch

torch.set_num_threads(1)
