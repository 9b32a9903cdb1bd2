"""Random tests of steadygpt/data/tokenizer_check.py: a file is refused or gives the ids of the `tokenizers` library."""

import json
import random

from test_tokenizer_json import PATTERNS, added_token, loaded
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from steadygpt.base.options import UserError
from steadygpt.data import tokenizer_check

CHARACTERS = "aaaabbbbcccdd1122  \n\t'.-é你\u0301\u00a0"
PARTS = (
    r"\p{L}+ | ?\p{L}+|[^\r\n\p{L}\p{N}]?\p{L}+|[ab]+|\p{N}{1,3}|\p{N}|\d+|\s+(?!\S)|\s*[\r\n]+| ?[^\s\p{L}\p{N}]+|"
    r"(?i:'t)|(?i:'ll)|a{2,3}|(?:ab)+|a$|\w+|\p{M}|'|b(?=c)|[^a]+?c|ac*+"
).split("|")


def random_text(choice: random.Random) -> str:
    return "".join(choice.choices(CHARACTERS, k=choice.randrange(60)))


def random_pattern(choice: random.Random) -> str:
    if choice.random() < 0.5:
        return choice.choice([*PATTERNS.values()])
    return "|".join([*choice.sample(PARTS, choice.randrange(1, 4)), r"\s+", r"[\s\S]"])


def random_tokenizer(pattern: str, choice: random.Random) -> dict:
    """Return the content of the tokenizer.json of a small BPE with many tokens that compete for the same characters."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=choice.random() < 0.3))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=256 + choice.randrange(60), initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([random_text(choice) for _ in range(50)], trainer)
    return json.loads(tokenizer.to_str())


def change_merges(content: dict, choice: random.Random) -> None:
    """Swap two merges, drop one, add another pair that forms the same token, or swap the ids of two tokens."""
    vocab, merges = content["model"]["vocab"], content["model"]["merges"]
    kind = choice.choice(["none", "swap", "drop", "add", "ids", "byte ids"]) if len(merges) > 1 else "none"
    if kind == "swap":
        at = choice.randrange(len(merges) - 1)
        merges[at], merges[at + 1] = merges[at + 1], merges[at]
    elif kind == "drop":
        merges.pop(choice.randrange(len(merges)))
    elif kind == "add":
        left, right = choice.choice(merges)
        merges.append([left[:1], left[1:] + right])
        merges.sort(key=lambda pair: vocab["".join(pair)])
    elif kind != "none":
        first, second = choice.sample([token for token in vocab if len(token) == 1 or kind == "ids"], 2)
        vocab[first], vocab[second] = vocab[second], vocab[first]


def change_the_rest(content: dict, choice: random.Random) -> None:
    """Add a token with random flags, or a normalizer."""
    if choice.random() < 0.5:
        text = "".join(choice.choices("ab <'é", k=choice.randrange(1, 4)))
        flags = {flag: choice.random() < 0.2 for flag in ("lstrip", "rstrip", "single_word", "special", "normalized")}
        content["added_tokens"] = [added_token(text, len(content["model"]["vocab"]), **flags)]
    if choice.random() < 0.3:
        content["normalizer"] = {"type": choice.choice(["NFC", "NFC", "NFD", "Lowercase"])}


def outcome(content: dict, choice: random.Random) -> str:
    """Return why a file is refused, or "" if it is accepted, with the ids of the library on random texts."""
    try:
        ours = loaded(json.dumps(content))
    except UserError as error:
        assert "\n" not in str(error)
        return str(error)
    library = Tokenizer.from_str(json.dumps(content))
    library.encode_special_tokens = True
    for text in [random_text(choice) for _ in range(200)]:
        assert ours.encode(text) == library.encode(text).ids, (text, content)
    return ""


def test_merges_that_are_accepted_without_any_text_give_the_ids_of_the_library(monkeypatch):
    monkeypatch.setattr(tokenizer_check, "_hard_texts", lambda _: [])
    outcomes = []
    for seed in range(75):
        choice = random.Random(seed)
        content = random_tokenizer(r"[a-d]+|[\s\S]", choice)
        change_merges(content, choice)
        outcomes.append(outcome(content, choice))
    assert 15 < outcomes.count("") < 60


def test_random_files_are_refused_or_give_the_ids_of_the_library():
    outcomes = []
    for seed in range(12):
        choice = random.Random(seed)
        content = random_tokenizer(random_pattern(choice), choice)
        change_the_rest(content, choice)
        outcomes.append(outcome(content, choice))
    assert 2 < outcomes.count("") < 10
