"""HellaSwag scores of lm-evaluation-harness on an exported checkpoint, beside our scorer in both styles.

    pip install "lm-eval[hf]" safetensors tokenizers
    python -m benchmarks.lm_eval_agreement checkpoints/latest.pt --hellaswag_file hellaswag_val.jsonl [--limit 500]

EleutherAI's harness runs its own task on the same file, so nothing is downloaded.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch

from convert_hf import write_folder
from generate import load_model
from hellaswag_eval import STYLES, evaluate, load_examples, tokenize
from steadygpt.checkpoint import read_checkpoint
from steadygpt.distributed import Ranks
from steadygpt.tokenizer import get_tokenizer

TASK = """
include: {harness}/tasks/hellaswag/hellaswag.yaml
task: hellaswag_file
dataset_path: json
dataset_name: null
dataset_kwargs: {{data_files: {{validation: {file}}}}}
training_split: null
"""


def scores_of_harness(folder: Path, examples: list[dict], device: str) -> dict[str, float]:
    """Return acc and acc_norm of a Hugging Face folder, in fp32."""
    import lm_eval

    asked = folder.parent / "hellaswag.jsonl"
    parts = [{"ctx_a": example["ctx"], "ctx_b": ""} | example for example in examples]
    asked.write_text("".join(json.dumps(part) + "\n" for part in parts))
    tasks = folder.parent / "tasks"
    tasks.mkdir()
    (tasks / "hellaswag_file.yaml").write_text(TASK.format(harness=Path(lm_eval.__file__).parent, file=asked))
    found = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(folder), "dtype": "float32"},
        tasks=["hellaswag_file"],
        task_manager=lm_eval.tasks.TaskManager(include_path=str(tasks)),
        device=device,
        batch_size=16,
    )["results"]["hellaswag_file"]
    return {"acc": found["acc,none"], "acc_norm": found["acc_norm,none"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--hellaswag_file", required=True)
    parser.add_argument("--limit", type=int, default=None, help="score only the first LIMIT examples")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    checkpoint = read_checkpoint(args.checkpoint)
    examples = load_examples(args.hellaswag_file)[: args.limit]
    ranks, model = Ranks(torch.device(args.device)), load_model(checkpoint).to(args.device)
    rows = []
    for style in STYLES:
        start = time.perf_counter()
        scored = tokenize(examples, get_tokenizer(checkpoint["tokenizer"]), model.config.context_length, style)
        scores = evaluate(model, scored, ranks)
        rows.append((f"hellaswag_eval.py --style {style}", scores.acc, scores.acc_norm, time.perf_counter() - start))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "exported"
        write_folder(checkpoint, folder)
        start = time.perf_counter()
        harness = scores_of_harness(folder, examples, args.device)
        rows.append(("lm-evaluation-harness", harness["acc"], harness["acc_norm"], time.perf_counter() - start))
    print(f"{len(examples):,} examples, fp32\n{'':<40} {'acc':>7} {'acc_norm':>9} {'s':>7}")
    for name, acc, acc_norm, seconds in rows:
        print(f"{name:<40} {acc:>7.4f} {acc_norm:>9.4f} {seconds:>7.1f}")


if __name__ == "__main__":
    main()
