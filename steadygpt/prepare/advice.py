"""Commands, for errors and notes, that convert a file to one that prepare_dataset.py reads."""

import glob
import re
import shlex

# Kind of a file -> arguments of datasets.load_dataset() that read it. Of a table, only the text column is read, as
# strings: with guessed types, the word None would be lost, and a number in a column of words would be an error.
LOADERS = {
    "csv": "'csv', usecols=[{field!r}], converters={{{field!r}: str}}, na_filter=False",
    "tsv": "'csv', usecols=[{field!r}], converters={{{field!r}: str}}, na_filter=False, sep='\\t'",
    "txt": "'text', sample_by='document'",
    "md": "'text', sample_by='document'",
}
NAME = re.compile(
    r"(?P<stem>.+?)(\.(?P<kind>csv|tsv|jsonl?|ndjson|txt|md))?(\.(?P<packing>gz|zst|xz|bz2|lzma))?",
    re.IGNORECASE | re.DOTALL,
)
ORIGINAL = ".original"  # appended to the name of a converted file that was misnamed as JSON Lines


def parts_of(name: str) -> tuple[str, str, str]:
    """Return the name of a file without its suffixes; its kind and its packing, in lower case, or ""."""
    parts = NAME.fullmatch(name)
    assert parts, "the pattern matches any name"
    return parts["stem"], (parts["kind"] or "").lower(), (parts["packing"] or "").lower()


def target_of(name: str) -> str:
    """Return the name of the JSON Lines that a file is converted to; "" if there is no need to convert it."""
    stem, kind, packing = parts_of(name)
    if kind in ("csv", "tsv", "json") or packing in ("xz", "bz2", "lzma"):
        return f"{stem}.jsonl"
    return ""


def converted(name: str) -> str:
    """Return the name of the JSON Lines that convert_command() writes."""
    stem, _, _ = parts_of(name)
    return target_of(name) or f"{stem}.lines.jsonl"


def convert_command(name: str, field: str) -> str:
    """Return the command that writes a table, a packed text, or any JSON as JSON Lines; the old file stays.

    JSON in a file that is named as JSON Lines gets another name.

    Args:
        field: the column with the text.
    """
    if "://" in name:
        return "copy it to this machine, and convert it there"
    _, kind, _ = parts_of(name)
    loader = LOADERS.get(kind or "txt", "'json'").format(field=field)
    target = converted(name)
    load = f"datasets.load_dataset({loader}, data_files={glob.escape(name)!r})"
    code = f"import datasets; {load}['train'].to_json({target!r})"
    command = f'python -c "{code}"'
    if re.search(r'["$`\\!]', code.replace(r"sep='\t'", "")):  # which have a meaning between double quotes
        command = shlex.join(["python", "-c", code])
    return command if target_of(name) else f"{command} && {rename_command(name, f'{name}{ORIGINAL}')}"


def rename_command(name: str, target: str) -> str:
    return shlex.join(["mv", "-n", name, target])  # -n: never overwrite a file
