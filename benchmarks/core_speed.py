"""CORE beside nanochat's evaluation: the answers to each example, and examples per second, with the same weights.

    git clone https://github.com/karpathy/nanochat
    python -m benchmarks.core_speed --nanochat nanochat [--core_dir eval_bundle] [--rows 40] [--checkpoint latest.pt]

Without --core_dir, the bundle is made up: the 22 tasks of CORE with their kinds and numbers of examples before each,
of random words, with prompts that are too long, empty continuations, equal choices and all of Unicode.
Theirs is evaluate_example() of nanochat/core_eval.py, around our model, whose logits are the same. Both in fp32.
"""

import importlib.util
import json
import random
import tempfile
import time
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from benchmarks.compare import benchmark_parser, in_turn, report
from model import GPT, GPTConfig
from steadygpt.checkpoint.files import read_checkpoint
from steadygpt.convert.weights import load_model
from steadygpt.data.tasks import CORE, KINDS, Task, load_core
from steadygpt.data.tokenizer import Tokenizer, TokenizerRecord, load_tokenizer
from steadygpt.inference.scoring import Suite, right_answers, score
from steadygpt.machine.device import evaluating
from steadygpt.machine.ranks import joined

CHOICE, SCHEMA, GREEDY = list(KINDS)[1:]
TASKS = {  # kind, examples before each, delimiter, chance in percent, choices
    "hellaswag_zeroshot": (CHOICE, 0, " ", 25, 4), "jeopardy": (GREEDY, 10, "\nAnswer: ", 0, 1),
    "bigbench_qa_wikidata": (GREEDY, 10, " ", 0, 1), "arc_easy": (CHOICE, 10, "\nAnswer: ", 25, 4),
    "arc_challenge": (CHOICE, 10, "\nAnswer: ", 25, 4), "copa": (CHOICE, 0, " ", 50, 2),
    "commonsense_qa": (CHOICE, 10, "\nAnswer: ", 40.3, 5), "piqa": (CHOICE, 10, "\nAnswer: ", 50, 2),
    "openbook_qa": (CHOICE, 0, " ", 25, 4), "lambada_openai": (GREEDY, 0, " ", 0, 1),
    "hellaswag": (CHOICE, 10, " ", 25, 4), "winograd": (SCHEMA, 0, " ", 50, 2), "winogrande": (SCHEMA, 0, " ", 50, 2),
    "bigbench_dyck_languages": (GREEDY, 10, " ", 0, 1), "agi_eval_lsat_ar": (CHOICE, 3, "\nAnswer: ", 25, 5),
    "bigbench_cs_algorithms": (GREEDY, 10, " ", 0, 1), "bigbench_operators": (GREEDY, 10, "", 0, 1),
    "bigbench_repeat_copy_logic": (GREEDY, 10, " ", 0, 1), "squad": (GREEDY, 10, "\nAnswer: ", 0, 1),
    "coqa": (GREEDY, 0, " ", 0, 1), "boolq": (CHOICE, 10, "\nAnswer: ", 62, 2),
    "bigbench_language_identification": (CHOICE, 10, " ", 25, 11),
}  # fmt: skip
WORDS = (
    "the of and to in a is that it was for on are with as his they at be this from I have or by one had not but what "
    "all were when we there can an your which their said if do will each about how up out them then she many some so "
    "Köln Žižkov 東京 Москва مدينة 🙂 naïve don't 3,141 x²+1 \u2028 \u00a0 ﬁ e\u0301 <|endoftext|>"
).split(" ")


def write_bundle(folder: Path, rows: int = 40, seed: int = 0) -> None:
    """Write an evaluation bundle of random words, which is broken nowhere but strange in many places."""
    pick = random.Random(seed)

    def words(most: int) -> str:
        return " ".join(pick.choice(WORDS) for _ in range(pick.randint(1, most)))

    def row(kind: str, choices: int) -> dict:
        context = words(pick.choice([8, 40, 80]))
        is_strange = pick.random() < 0.1
        texts = [words(8) for _ in range(choices)]
        if is_strange:
            context = pick.choice([words(1500), "", f"  {context} \n", context])
            texts[pick.randrange(choices)] = pick.choice(
                [texts[0], f"{texts[0]} {words(3)}", "." if kind == GREEDY else ""]
            )
        if kind == GREEDY:
            return {"context": context, "continuation": pick.choice(["a", words(1), texts[0]])}
        if kind == SCHEMA:
            contexts = [f"{context} {text}".strip() for text in texts]
            return {"context_options": contexts, "continuation": words(12), "gold": pick.randrange(choices)}
        return {"query": context, "choices": texts, "gold": pick.randrange(choices)}

    entries = []
    for label, (kind, shots, delimiter, _, choices) in TASKS.items():
        path = folder / "eval_data" / kind / f"{label}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(row(kind, choices), ensure_ascii=pick.random() < 0.5) for _ in range(rows)]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        entry = f"- label: {label}\n  dataset_uri: {kind}/{path.name}\n  num_fewshot: [{shots}]\n"
        entry += f"  icl_task_type: {kind}\n"
        if delimiter != " ":
            entry += f"  continuation_delimiter: {json.dumps(delimiter)}\n"
        entries.append(entry)
    (folder / "core.yaml").write_text("icl_tasks:\n" + "".join(entries))
    chances = "".join(f"{label},{chance}\n" for label, (*_, chance, _) in TASKS.items())
    (folder / "eval_meta_data.csv").write_text(f"Eval Task,Random baseline\n{chances}")


class TheirView:
    """Our model and tokenizer as nanochat's evaluation expects them."""

    def __init__(self, model: GPT, tokenizer: Tokenizer):
        self.model = model
        self.tokenizer = tokenizer
        self.max_seq_len = model.config.context_length

    def __call__(self, ids_or_texts: Tensor | list[str], prepend: int = 0) -> Tensor | list[list[int]]:
        if isinstance(ids_or_texts, Tensor):
            return self.model(ids_or_texts)
        return [[prepend, *self.tokenizer.encode(text)] for text in ids_or_texts]

    def get_bos_token_id(self) -> int:
        return self.tokenizer.document_id


def their_rows(task: Task) -> list[dict]:
    """Return the rows of a task as nanochat reads them, in its order."""
    rows = []
    for answers, gold in task.rows:
        contexts, continuations = zip(*answers, strict=True)
        columns = KINDS[task.kind][0].split(", ")
        values = {
            "query": contexts[0], "choices": continuations, "context": contexts[0], "continuation": continuations[0],
            "context_options": contexts, "gold": gold,
        }  # fmt: skip
        rows.append({name: values[name] for name in columns})
    return rows


def their_module(checkout: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("core_eval", checkout / "nanochat" / "core_eval.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--nanochat", type=Path, help="a checkout of nanochat; without it, ours alone")
    parser.add_argument("--core_dir", type=Path, help="an evaluation bundle (default: one is made up)")
    parser.add_argument("--rows", type=int, default=40, help="examples of each task (default: 40)")
    parser.add_argument("--checkpoint", type=Path, help="default: random weights, in the shape of --size")
    parser.add_argument(
        "--size", type=int, nargs=3, default=(4, 4, 256), help="layers, heads, width (default: 4 4 256)"
    )
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.checkpoint:
        checkpoint = read_checkpoint(args.checkpoint)
        model = load_model(checkpoint)
        tokenizer = load_tokenizer(TokenizerRecord.of(checkpoint))
    else:
        layers, heads, width = args.size
        model = GPT(GPTConfig(vocab_size=50257, num_layers=layers, num_heads=heads, embd_size=width))
        tokenizer = load_tokenizer(TokenizerRecord("gpt2"))
        torch.nn.init.normal_(model.wte.weight, std=0.3)
    with joined("auto") as ranks, tempfile.TemporaryDirectory() as made, evaluating(model.to(ranks.device)):
        if not args.core_dir:
            write_bundle(Path(made), args.rows)
        folder = str(args.core_dir or made)
        tasks = load_core(folder, args.rows)
        view = TheirView(model, tokenizer)
        answers = {}

        def ours() -> float:
            start = time.perf_counter()
            suite = Suite.load(CORE, folder, args.rows, tokenizer, model.config.context_length, ranks)
            answers["ours"] = right_answers(suite.questions, score(model, suite.questions, ranks))[1].tolist()
            return len(answers["ours"]) / (time.perf_counter() - start)

        def nanochat() -> float:
            theirs = their_module(args.nanochat)
            start = time.perf_counter()
            right: list[bool | None] = []
            for task in tasks:
                meta = {"task_type": task.kind, "num_fewshot": task.shots, "continuation_delimiter": task.delimiter}
                rows = their_rows(task)
                for number in range(len(rows)):
                    try:
                        right.append(bool(theirs.evaluate_example(number, view, view, rows, ranks.device, meta)))
                    except AssertionError:  # where tokens of the context join those of the continuation
                        right.append(None)
            answers["nanochat"] = right
            return len(right) / (time.perf_counter() - start)

        sides = {"SteadyGPT": ours}
        if args.nanochat:
            sides["nanochat"] = nanochat
        figures = in_turn(sides, args.rounds, "examples/s")
    print(f"{len(answers['ours']):,} examples, {sum(answers['ours']):,} right")
    theirs = answers.get("nanochat")
    if theirs:
        pairs = enumerate(zip(answers["ours"], theirs, strict=True))
        differing = [number for number, (our_answer, their_answer) in pairs if their_answer not in (our_answer, None)]
        print(f"nanochat refuses {theirs.count(None)}; the answers to these differ: {differing}")
    report(figures, "examples/s", args)


if __name__ == "__main__":
    main()
