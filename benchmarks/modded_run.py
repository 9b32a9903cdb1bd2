"""Train modded-nanogpt's simple baseline with its optimizers and schedule, on the rows of our train.py.

    git clone https://github.com/KellerJordan/modded-nanogpt
    python -m benchmarks.modded_run modded-nanogpt 0.5 out.json --config modern --max_steps 460 ...   # of train.py

The options give the shape, the data, the steps and the evaluations. All else is the baseline's own: its model,
initialization, optimizers, schedule and precision are read from records/track_3_optimization/train_gpt_simple.py, with
all learning rates multiplied by the factor. The weight decay, which is relative to the learning rate, is unchanged. As
in that script, the gradient is the sum over the tokens of a step. Its size matters only beside Adam's epsilon, 1e-10.
"""

import ast
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.reference_run import arguments, train

SCRIPT = "records/track_3_optimization/train_gpt_simple.py"


def definitions_and_setup(script: Path) -> tuple[list[ast.stmt], list[ast.stmt]]:
    """Return the imports, classes and functions of the script, and what a trial does before it trains.

    The script trains as soon as it is imported, so they are taken from its source. The setup initializes `model`,
    makes `optimizers` and defines `set_hparams(step)`; the number of steps, `train_steps`, is left out.
    """
    definitions = []
    setup: list[ast.stmt] = []
    for node in ast.parse(script.read_text()).body:
        if isinstance(node, ast.Import | ast.ImportFrom | ast.ClassDef | ast.FunctionDef):
            definitions.append(node)
        if isinstance(node, ast.For) and ast.unparse(node.iter) == "range(num_trials)":
            setup = [statement for statement in node.body if not ast.unparse(statement).startswith("train_steps =")]
    names = [getattr(statement, "name", "") for statement in setup]
    return definitions, setup[: names.index("set_hparams") + 1]


def main(argv: Sequence[str]) -> None:
    checkout, factor, out, config, data, device = arguments(argv)
    script = checkout / SCRIPT
    definitions, setup = definitions_and_setup(script)
    if not config.compiles(device.type):
        for node in definitions:
            if isinstance(node, ast.FunctionDef):
                node.decorator_list = []  # torch.compile
    # Its optimizer Muon talks to the other ranks, and here there are none.
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    names: dict[str, Any] = {"train_steps": config.max_steps}
    exec(compile(ast.Module(definitions, []), script, "exec"), names)
    names["CausalSelfAttention"].__init__.__defaults__ = (config.embd_size // config.num_heads,)  # its head_dim
    torch.manual_seed(config.seed)
    shape = {"vocab_size": data.vocab_size, "num_layers": config.num_layers, "model_dim": config.embd_size}
    model = names["GPT"](**shape).to(device)
    print(f"modded-nanogpt: {sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    names["model"] = model
    exec(compile(ast.Module(setup, []), script, "exec"), names)
    for optimizer in names["optimizers"]:
        for group in optimizer.param_groups:
            group["initial_lr"] *= factor
    if config.compiles(device.type):
        model.compile(dynamic=False)

    def mean_loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return model(inputs, targets) / targets.numel()

    def update(step: int) -> None:
        names["set_hparams"](step)
        for optimizer in names["optimizers"]:
            optimizer.step()
        model.zero_grad(set_to_none=True)

    train(config, data, mean_loss, config.mini_batch_size * config.context_length, update, device, out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
