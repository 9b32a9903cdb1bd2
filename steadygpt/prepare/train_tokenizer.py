"""Training of a byte-level BPE on a part of a source."""

import re
import sys
import threading
from collections.abc import Iterable, Iterator

from steadygpt.base.options import UserError
from steadygpt.base.progress import ProgressBar, say
from steadygpt.data.tokenizer import END_OF_TEXT, TokenizerRecord, load_tokenizer
from steadygpt.prepare.documents import Damaged, Wanted, cut_document, read_documents, repair
from steadygpt.prepare.sources import Place, Source

TRAINING_BYTES = 10**9
LONGEST_WORD = 1000  # characters; training time grows with the square of a word's length
_LONG_WORD = re.compile(rf"\S{{{LONGEST_WORD}}}|\s{{{LONGEST_WORD}}}")


def train_tokenizer(source: Source, wanted: Wanted, vocab_size: int, limit: int) -> str:
    """Train a BPE of `vocab_size` tokens on `limit` bytes of text, and return its tokenizer.json.

    The same source and limit give the same tokenizer.
    """
    results: list[str | Exception] = []

    def train() -> None:
        try:
            results.append(train_bpe(choose_texts(source, wanted, limit), vocab_size))
        except Exception as error:  # for the main thread
            results.append(error)

    # The library ignores signals, so train in a daemon thread: Ctrl-C ends the main thread, which only waits.
    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.1)
    (trained,) = results
    if isinstance(trained, Exception):
        raise trained
    n_vocab = load_tokenizer(TokenizerRecord(f"bpe:{vocab_size}", tokenizer_json=trained)).n_vocab
    if n_vocab < vocab_size:
        raise UserError(
            f"--tokenizer bpe:{vocab_size}: {source.name} has text for {n_vocab:,} tokens only; try "
            f"--tokenizer bpe:{n_vocab}, more text or a larger --tokenizer_bytes"
        )
    return trained


def choose_texts(source: Source, wanted: Wanted, limit: int) -> Iterator[str]:
    """Yield text from the beginning of each file, in proportion to its size, about `limit` bytes in all."""
    with ProgressBar(desc="reading text for the tokenizer", total=min(limit, source.size), unit="B") as bar:
        is_empty = True
        for number, file in enumerate(source.files):
            left = -(-limit * file.size // max(1, source.size))  # bytes of text that this file may still give
            for block in source.blocks(wanted, Place(number)):
                if block.file != number or left <= 0:
                    break
                if isinstance(block.data, Damaged):
                    raise block.data
                for document in read_documents(block, wanted):
                    if isinstance(document.text, str):
                        data = repair(document.text).encode()[: max(0, left)]
                        for piece, _ in cut_document(data.decode(errors="ignore")):
                            yield from cut_words(piece)
                            is_empty = False
                        left -= len(data)
                        bar.update(len(data))
    if is_empty:
        raise UserError(f"{source.name}: no text; expected some to train a tokenizer on")
    say("training the tokenizer ...")


def cut_words(text: str) -> Iterator[str]:
    """Cut a text after each LONGEST_WORD characters without white space, or of white space only."""
    start = 0
    for word in _LONG_WORD.finditer(text):
        yield text[start : word.end()]
        start = word.end()
    yield text[start:]


def train_bpe(texts: Iterable[str], vocab_size: int) -> str:
    """Train a BPE with GPT-2's pattern, all bytes as tokens, and <|endoftext|> as the last token."""
    try:
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError:
        raise UserError("--tokenizer bpe:N needs tokenizers; pip install tokenizers") from None
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1, initial_alphabet=alphabet, show_progress=sys.stderr.isatty()
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return tokenizer.to_str(pretty=True)
