"""One thread a process: tiny models gain nothing from more, and processes side by side lose."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in every child process
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"

import torch

torch.set_num_threads(1)
