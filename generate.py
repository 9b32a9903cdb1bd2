"""Sample text from a checkpoint.

python generate.py --prompt "Hello, I'm a language model," --num_seq 4
python generate.py checkpoints/best_model.pt --prompt "def " --max_tokens 200 --temperature 0.8 --top_k 50
"""

from pathlib import Path

import torch

from model import GPT
from steadygpt.checkpoint import open_checkpoint
from steadygpt.cli import OneLineParser, UserError, run_cli
from steadygpt.device import autocast, choose_precision
from steadygpt.distributed import joined
from steadygpt.tokenizer import get_tokenizer


def sample_texts(
    model: GPT, tokenizer, prompt: str, max_tokens: int, generator: torch.Generator, count: int = 1, **options
) -> list[str]:
    """Texts that begin a document with `prompt`, and end with the document or after max_tokens.

    Args:
        generator: on the model's device; the only source of randomness.
        options: temperature and top_k of GPT.generate.
    """
    start = [tokenizer.eot_token, *tokenizer.encode_ordinary(prompt)]  # as each document of the data begins
    idx = torch.tensor([start] * count, device=generator.device)
    texts = []
    for ids in model.generate(idx, max_tokens, generator=generator, **options)[:, 1:].tolist():
        end = ids.index(tokenizer.eot_token) if tokenizer.eot_token in ids else len(ids)
        texts.append(tokenizer.decode(ids[:end]))
    return texts


def main() -> int:
    parser = OneLineParser(description="Sample text from a checkpoint.")
    parser.add_argument("checkpoint", nargs="?", default="latest", help="latest, best or a file (default: latest)")
    parser.add_argument(
        "--checkpoint_dir", default="checkpoints", help="where latest and best are (default: checkpoints)"
    )
    parser.add_argument("--prompt", default="", help="what to continue (default: the start of a document)")
    parser.add_argument("--num_seq", type=int, default=1, help="texts (default: 1)")
    parser.add_argument("--max_tokens", type=int, default=200, help="tokens to add to each (default: 200)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token (default: 0.8)")
    parser.add_argument("--top_k", type=int, default=50, help="sample among the k likeliest; 0: all (default: 50)")
    parser.add_argument("--seed", type=int, default=1337, help="the same seed gives the same text (default: 1337)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, mps (default: auto)")
    parser.add_argument("--precision", default="auto", choices=("auto", "fp32", "bf16", "fp16"))
    args = parser.parse_args()
    if args.num_seq < 1 or args.max_tokens < 1 or not args.temperature >= 0 or args.top_k < 0:
        raise UserError("--num_seq and --max_tokens are at least 1, --temperature and --top_k at least 0")
    with joined(args.device) as ranks:
        _, checkpoint = open_checkpoint(args.checkpoint, Path(args.checkpoint_dir))
        model = GPT.from_checkpoint(checkpoint).to(ranks.device)
        tokenizer = get_tokenizer(checkpoint["tokenizer"])
        generator = torch.Generator(ranks.device).manual_seed(args.seed)
        options = {"temperature": args.temperature, "top_k": args.top_k}
        with autocast(ranks.device, choose_precision(args.precision, ranks.device)):
            texts = sample_texts(model, tokenizer, args.prompt, args.max_tokens, generator, args.num_seq, **options)
        for number, text in enumerate(texts, start=1):
            if args.num_seq > 1:
                print(f"--- {number} of {args.num_seq}")
            print(text)
    return 0


if __name__ == "__main__":
    run_cli(main)
