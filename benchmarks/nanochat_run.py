"""Train nanochat's model with its optimizer and schedules, on the rows that our train.py would train on.

    git clone https://github.com/karpathy/nanochat
    python -m benchmarks.nanochat_run nanochat 8 out.json --config modern --max_steps 3000 ...    # options of train.py

The options give the shape, the data, the steps and the evaluations. All else is nanochat's: what its
scripts/base_train.py computes for a batch of this size, with all learning rates multiplied by the factor. Its weight
decay is divided by the factor, so that what the decay removes in a step stays the same. (Its rule for the batch has its
reference at 524,288 tokens, and gives rates that are far too low for small batches.)
"""

import ast
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.reference_run import arguments, train

OPTIONS = ("weight_decay", "embedding_lr", "unembedding_lr", "scalar_lr", "matrix_lr", "warmup_steps", "warmdown_ratio",
           "final_lr_frac")  # fmt: skip
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
SCHEDULES = ("get_lr_multiplier", "get_muon_momentum", "get_weight_decay")


def options_and_schedules(script: Path) -> tuple[dict[str, float], list[ast.stmt]]:
    """Return the defaults of the OPTIONS of its training script, and the definitions of its SCHEDULES.

    The script trains as soon as it is imported, so they are taken from its source.
    """
    defaults = {}
    functions = []
    for node in ast.parse(script.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name in SCHEDULES:
            functions.append(node)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and node.value.args:
            name = getattr(node.value.args[0], "value", "")
            name = str(name).removeprefix("--").replace("-", "_")
            if name in OPTIONS:
                (default,) = (keyword.value for keyword in node.value.keywords if keyword.arg == "default")
                defaults[name] = ast.literal_eval(default)
    return defaults, functions


def main(argv: Sequence[str]) -> None:
    checkout, factor, out, config, data, device = arguments(argv)
    os.environ["NANOCHAT_DTYPE"] = DTYPES[config.precision]  # read when nanochat is imported
    sys.path.insert(0, str(checkout))
    from nanochat.gpt import GPT, GPTConfig

    def shape(**changes: int) -> GPTConfig:
        heads, width, layers = config.num_heads, config.embd_size, config.num_layers
        own = {"n_layer": layers, "n_head": heads, "n_kv_head": heads, "n_embd": width, "vocab_size": data.vocab_size}
        return GPTConfig(sequence_len=config.context_length, window_pattern="L", **own | changes)

    def scaling_params(**changes: int) -> int:
        with torch.device("meta"):
            counts = GPT(shape(**changes)).num_scaling_params()
        return counts["transformer_matrices"] + counts["lm_head"]

    with torch.device("meta"):
        model = GPT(shape())
    torch.manual_seed(config.seed)
    model.to_empty(device=device)
    model.init_weights()
    print(f"nanochat: {sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    defaults, functions = options_and_schedules(checkout / "scripts/base_train.py")
    batch = math.sqrt(config.total_batch_size / 2**19)  # its rule for learning rates and weight decay
    # The decay also follows from the tokens that are its default for a model, relative to those for a depth of 12.
    tokens = scaling_params() / scaling_params(n_layer=12, n_head=6, n_kv_head=6, n_embd=768, vocab_size=32768)
    decay = defaults["weight_decay"] * batch / tokens / factor
    rates = {name: rate * batch * factor for name, rate in defaults.items() if name.endswith("_lr")}
    optimizer = model.setup_optimizer(weight_decay=decay, **rates)
    schedules: dict[str, Any] = {"math": math, "args": SimpleNamespace(**defaults), "num_iterations": config.max_steps}
    schedules["weight_decay_scaled"] = decay
    exec(compile(ast.Module(functions, []), "base_train.py", "exec"), schedules)
    forward = torch.compile(model, dynamic=False) if config.compiles(device.type) else model

    def update(step: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * schedules["get_lr_multiplier"](step)
            if group["kind"] == "muon":
                group["momentum"] = schedules["get_muon_momentum"](step)
                group["weight_decay"] = schedules["get_weight_decay"](step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    train(config, data, forward, 1 / config.grad_accum_steps(1), update, device, out)


if __name__ == "__main__":
    main(sys.argv[1:])
