"""What the server of forked processes imports once: all that ranks and their faults import."""

# ruff: noqa: F401
import contextlib
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent
sys.path[:0] = [str(folder) for folder in (TESTS.parent, TESTS, TESTS / "faults")]

with contextlib.suppress(ImportError):  # a GPU machine may lack them; a failed import would end the preloading
    import datasets
    import s3fs
import fsspec.implementations.http
import harness
import injected
import psutil
import torch._dynamo
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.utils.tensorboard

import prepare_dataset
