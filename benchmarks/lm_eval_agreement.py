"""Scores of lm-evaluation-harness on an exported checkpoint, beside those of our scorer: HellaSwag, ARC and PIQA.

    pip install "lm-eval[hf]" safetensors tokenizers
    python -m benchmarks.lm_eval_agreement latest.pt --task hellaswag=hellaswag_val.jsonl,piqa=FILE [--limit 500]

EleutherAI's harness runs its own tasks on the same files, so nothing is downloaded.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch

from convert_hf import write_folder
from generate import load_model
from hellaswag_eval import evaluate, tokenize
from steadygpt.checkpoint import read_checkpoint
from steadygpt.distributed import Ranks
from steadygpt.tasks import STYLES, load_examples, parse_tasks
from steadygpt.tokenizer import get_tokenizer

TASK = """
include: {harness}/tasks/{group}/{name}.yaml
task: {name}_file
dataset_path: json
dataset_name: null
dataset_kwargs: {{data_files: {{validation: {file}}}}}
training_split: null
test_split: null
"""


def run_harness(folder: Path, name: str, file: str, limit: int | None = None, device: str = "cpu") -> dict:
    """Score a Hugging Face folder in fp32 on a task's file; return {"acc,none": ..., "samples": [...], ...}."""
    import lm_eval

    rows = [json.loads(line) for line in Path(file).read_text(encoding="utf-8").rstrip("\n").split("\n")[:limit]]
    if name == "hellaswag":
        rows = [{"ctx_a": row["ctx"], "ctx_b": ""} | row for row in rows]
    with tempfile.TemporaryDirectory() as tasks:
        asked, harness, group = Path(tasks, "rows.jsonl"), Path(lm_eval.__file__).parent, name.partition("_")[0]
        asked.write_text("".join(json.dumps(row) + "\n" for row in rows))
        Path(tasks, "task.yaml").write_text(TASK.format(harness=harness, group=group, name=name, file=asked))
        found = lm_eval.simple_evaluate(
            model="hf",
            model_args={"pretrained": str(folder), "dtype": "float32"},
            tasks=[f"{name}_file"],
            task_manager=lm_eval.tasks.TaskManager(include_path=tasks, include_defaults=False),
            device=device,
            batch_size=16,
        )
    return found["results"][f"{name}_file"] | {"samples": found["samples"][f"{name}_file"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--task", required=True, help="NAME=FILE, or several with commas")
    parser.add_argument("--limit", type=int, default=None, help="score only the first LIMIT examples")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    checkpoint = read_checkpoint(args.checkpoint)
    ranks, model = Ranks(torch.device(args.device)), load_model(checkpoint).to(args.device)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "exported"
        write_folder(checkpoint, folder)
        for name, file in parse_tasks(args.task).items():
            rows = []
            for style in STYLES if name == "hellaswag" else ("lm_eval",):
                start = time.perf_counter()
                examples = load_examples(name, file, style)[: args.limit]
                trees = tokenize(examples, get_tokenizer(checkpoint["tokenizer"]), model.config.context_length)
                ours = evaluate(model, trees, ranks)
                rows.append((f"hellaswag_eval.py, {style}", ours.acc, ours.acc_norm, time.perf_counter() - start))
            start = time.perf_counter()
            theirs = run_harness(folder, name, file, args.limit, args.device)
            seconds = time.perf_counter() - start
            rows.append(("lm-evaluation-harness", theirs["acc,none"], theirs["acc_norm,none"], seconds))
            print(f"{f'{name}, {len(examples):,} examples, fp32':<40} {'acc':>7} {'acc_norm':>9} {'s':>7}")
            for what, acc, acc_norm, seconds in rows:
                print(f"{what:<40} {acc:>7.4f} {acc_norm:>9.4f} {seconds:>7.1f}")


if __name__ == "__main__":
    main()
