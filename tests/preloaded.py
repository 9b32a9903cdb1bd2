"""What the server of forked processes imports once: all that ranks and their faults import."""

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent
sys.path[:0] = [str(folder) for folder in (TESTS.parent, TESTS, TESTS / "faults")]

import datasets  # noqa: F401
import harness  # noqa: F401
import injected  # noqa: F401
import psutil  # noqa: F401
import torch._dynamo
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.utils.tensorboard  # noqa: F401

import prepare_dataset  # noqa: F401
