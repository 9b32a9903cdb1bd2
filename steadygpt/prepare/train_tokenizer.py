"""Training of a byte-level BPE on a part of a source."""

from collections.abc import Iterable, Iterator
from contextlib import closing
from itertools import accumulate, chain
from multiprocessing import get_context
from multiprocessing.connection import Connection

from steadygpt.base.options import UserError
from steadygpt.base.progress import ProgressBar, say
from steadygpt.data.tokenizer import END_OF_TEXT, TokenizerRecord, load_tokenizer
from steadygpt.prepare.documents import cut_document, read_documents, repair
from steadygpt.prepare.sources import Place, Source
from steadygpt.prepare.workers import end_with_main, without_ctrl_c

TRAINING_BYTES = 10**9


def train_tokenizer(source: Source, text_field: str, vocab_size: int, limit: int) -> str:
    """Train a BPE of `vocab_size` tokens on `limit` bytes of text, and return its tokenizer.json.

    The same source and limit give the same tokenizer.
    """
    try:
        import tokenizers  # noqa: F401 (only the child process uses it)
    except ImportError:
        raise UserError("--tokenizer bpe:N needs tokenizers; pip install tokenizers") from None
    # The library ignores signals, so it runs in a process that Ctrl-C can end.
    context = get_context("spawn")
    connection, other_end = context.Pipe()
    process = context.Process(target=_train_at, args=(other_end, vocab_size), daemon=True)
    with without_ctrl_c():
        process.start()
    other_end.close()
    try:
        is_empty = True
        with ProgressBar(desc="reading text for the tokenizer", total=sum(source.sizes) or None, unit="B") as bar:
            for texts in choose_texts(source, text_field, limit, bar):
                connection.send(texts)
                is_empty = is_empty and not any(texts)
        if is_empty:
            raise UserError(f"{source.name}: no text; expected some for --tokenizer bpe:{vocab_size}")
        connection.send(None)
        say(f"training a tokenizer of {vocab_size:,} tokens ...")
        trained = connection.recv()
    except (EOFError, ConnectionError) as error:
        raise UserError(
            "the process that trains the tokenizer was killed, perhaps for lack of memory; try less text with "
            "--tokenizer_bytes, and run the same command again"
        ) from error
    finally:
        process.terminate()
        process.join()
    n_vocab = load_tokenizer(TokenizerRecord(f"bpe:{vocab_size}", tokenizer_json=trained)).n_vocab
    if n_vocab < vocab_size:
        more_text = "more text"
        if limit < TRAINING_BYTES:
            more_text += " or a larger --tokenizer_bytes"
        raise UserError(
            f"--tokenizer bpe:{vocab_size}: {source.name} has text for {n_vocab:,} tokens only; try "
            f"bpe:{n_vocab} or less, or {more_text}"
        )
    return trained


def choose_texts(source: Source, text_field: str, limit: int, bar: ProgressBar) -> Iterator[list[str]]:
    """Choose documents by their position, up to `limit` bytes of text, and yield the chosen text of each block.

    Local files give documents from all over their text. Each file on a network gives its beginning, so that the rest
    need not be requested. A stream of rows gives its beginning.
    """
    total = sum(source.sizes)
    chosen_bytes = 0
    for file, before in enumerate(accumulate(source.sizes[:-1], initial=0)):
        size = source.sizes[file]
        begin = 0  # of the block in the file
        for block in source.blocks(text_field, 0, Place(file)):
            if block.file != file:
                break
            texts: list[str] = []
            documents = list(read_documents(block, text_field))
            for number, document in enumerate(documents, start=1):
                # A document is chosen if less text is chosen so far than the share of the text up to its end.
                end = size if source.remote else begin + (block.progress - begin) * number // len(documents)
                share = limit * (before + end) // total if total else limit
                if isinstance(document.text, str) and chosen_bytes < share:
                    data = repair(document.text).encode()[: limit - chosen_bytes]
                    texts += [piece for piece, _ in cut_document(data.decode(errors="ignore"))]
                    chosen_bytes += len(data)
            yield texts
            begin = block.progress
            bar.update(before + begin - bar.n)
            limit_after_file = limit * (before + size) // total if source.remote else limit
            if chosen_bytes >= limit_after_file:
                break
        if chosen_bytes >= limit:
            return


def _train_at(connection: Connection, vocab_size: int) -> None:
    """Train on the lists of texts that arrive until None, and send the tokenizer.json back."""
    end_with_main()
    with closing(connection):
        texts = chain.from_iterable(iter(connection.recv, None))
        connection.send(train_bpe(texts, vocab_size))


def train_bpe(texts: Iterable[str], vocab_size: int) -> str:
    """Train a BPE with GPT-2's pattern, all bytes as tokens, and <|endoftext|> as the last token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size - 1, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return tokenizer.to_str(pretty=True)
