"""The text of Linux's sources in one compressed file, for --scale 124m of tokens_to_loss.

    wget https://cdn.kernel.org/pub/linux/kernel/v6.x/linux-6.12.tar.xz
    python -m benchmarks.linux_text linux-6.12.tar.xz linux.jsonl.gz

    apt-get download linux-source-6.1 && dpkg-deb -x linux-source-6.1_*.deb .    # the same from Debian
    python -m benchmarks.linux_text usr/src/linux-source-6.1.tar.xz linux.jsonl.gz

Each line is a file of the sources, as JSON with its name, its text and its split. The order follows from the names
alone, so two machines with the same tarball write the same text; compare the SHA-256 that is printed, which is that of
the uncompressed text.

The validation split is the folders of HELD_OUT. Neighbouring files of Linux are often copies of each other with changed
names, so a split by single files would reward a model that remembers them. --compare counts this: of Linux 6.1.176,
3.6 % of the long lines of these folders are also in the training split; with single files it would be 11.8 %.
"""

import argparse
import gzip
import hashlib
import json
import lzma
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from steadygpt.base.options import UserError, run_cli
from steadygpt.base.text import bytes_text, counted

FOLDERS = (
    "Documentation", "block", "certs", "crypto", "fs", "include", "init", "io_uring", "ipc", "kernel", "lib", "mm",
    "net", "rust", "samples", "scripts", "security", "sound/core", "sound/usb", "tools", "virt", "arch/x86",
    "drivers/acpi", "drivers/ata", "drivers/base", "drivers/block", "drivers/char", "drivers/cpufreq", "drivers/dma",
    "drivers/hid", "drivers/i2c", "drivers/input", "drivers/iommu", "drivers/md", "drivers/nvme", "drivers/pci",
    "drivers/spi", "drivers/tty", "drivers/usb", "drivers/vfio", "drivers/virtio", "drivers/xen",
)  # fmt: skip
SUFFIXES = {".c", ".h", ".S", ".rs", ".rst", ".txt", ".py", ".pl", ".sh"}
LARGEST = 200_000  # bytes; larger files are mostly tables of numbers
HELD_OUT = ("Documentation/filesystems", "drivers/nvme", "fs/ubifs", "kernel/locking", "net/sctp", "security/apparmor")
LONG_LINE = 30  # characters; shorter lines are the same in many files


def is_within(name: str, folders: Sequence[str]) -> bool:
    return any(name.startswith(f"{folder}/") for folder in folders)


def read_texts(tarball: Path) -> Iterator[tuple[str, str]]:
    """Yield the name, without the first folder, and the text of each regular file of FOLDERS that is text in UTF-8.

    Raises: UserError if the tarball cannot be read.
    """
    try:
        with tarfile.open(tarball) as archive:
            for member in archive:
                name = "/".join(PurePosixPath(member.name).parts[1:])
                chosen = is_within(name, FOLDERS) and PurePosixPath(name).suffix in SUFFIXES
                if member.isreg() and chosen and 0 < member.size <= LARGEST:
                    content = archive.extractfile(member).read()
                    try:
                        text = content.decode()
                        name.encode()
                    except UnicodeError:  # of the content, or of the name
                        continue
                    if "\0" not in text:
                        yield name, text
    except (OSError, EOFError, lzma.LZMAError, tarfile.TarError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"{tarball}: cannot be read ({reason}); expected the tarball of Linux's sources") from None


def in_fixed_order(texts: dict[str, str], most_bytes: int) -> list[tuple[str, str]]:
    """Return names and texts in the order of the SHA-256 of the names, up to a total size."""
    chosen = []
    size = 0
    for name in sorted(texts, key=lambda name: hashlib.sha256(name.encode()).digest()):
        size += len(texts[name].encode())
        if size > most_bytes:
            break
        chosen.append((name, texts[name]))
    return chosen


def write_text(texts: Sequence[tuple[str, str]], out: Path) -> str:
    """Write the lines, compressed, and return the SHA-256 of the uncompressed text."""
    digest = hashlib.sha256()
    # Without a time and a name, so that the compressed file depends on nothing but the text and the version of zlib.
    with open(out, "wb") as file, gzip.GzipFile("", "wb", 9, file, mtime=0) as packed:
        for name, text in texts:
            split = "val" if is_within(name, HELD_OUT) else "train"
            line = json.dumps({"name": name, "split": split, "text": text}).encode() + b"\n"
            digest.update(line)
            packed.write(line)
    return digest.hexdigest()


def share_seen(held_out: Sequence[str], others: Sequence[str]) -> float:
    """Return the share of the long lines of some texts that other texts have, too, whatever their indentation."""
    seen = {line.strip() for text in others for line in text.splitlines()}
    lines = [line.strip() for text in held_out for line in text.splitlines()]
    long_lines = [line for line in lines if len(line) >= LONG_LINE]
    return sum(line in seen for line in long_lines) / max(1, len(long_lines))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("tarball", type=Path, help="linux-*.tar.xz or linux-source-*.tar.xz")
    parser.add_argument("out", type=Path, help="file to write, such as linux.jsonl.gz")
    parser.add_argument("--megabytes", type=float, default=200, help="of text, at most (default: 200)")
    parser.add_argument("--compare", action="store_true", help="print what validation shares with training")
    args = parser.parse_args(argv)
    if args.megabytes <= 0:
        raise UserError(f"--megabytes {args.megabytes:g}: expected more than 0")
    if not args.out.parent.is_dir():
        raise UserError(f"{args.out}: found no folder {args.out.parent}. Make it first")
    texts = in_fixed_order(dict(read_texts(args.tarball)), round(args.megabytes * 1e6))
    held_out = [text for name, text in texts if is_within(name, HELD_OUT)]
    others = [text for name, text in texts if not is_within(name, HELD_OUT)]
    if not held_out or not others:
        raise UserError(f"{args.tarball}: found no files of {' or '.join(FOLDERS[:3])}; expected Linux's sources")
    digest = write_text(texts, args.out)
    size, val_size = (sum(len(text.encode()) for text in part) for part in (held_out + others, held_out))
    print(f"{counted(len(texts), 'file')}, {bytes_text(size)} of text, of which {bytes_text(val_size)} for validation")
    print(f"{args.out}: {bytes_text(args.out.stat().st_size)}; SHA-256 of the uncompressed text: {digest}")
    if args.compare:
        by_file = [text for _, text in texts]
        count = len(by_file) * val_size // size
        shares = share_seen(held_out, others), share_seen(by_file[:count], by_file[count:])
        seen = "{:.1%} with these folders, {:.1%} with single files".format(*shares)
        print(f"lines of {LONG_LINE} characters or more that are also in the training split: {seen}")
    return 0


if __name__ == "__main__":
    run_cli(main)
