"""The Hugging Face Hub: data sets and models at one commit, downloaded or read in place, through network failures.

Beyond what huggingface_hub does, an interrupted download resumes from its partial file, also in a later run, and failed
requests are retried with growing pauses.
"""

import errno
import fcntl
import io
import json
import os
import sys
import textwrap
from collections.abc import Callable, Mapping
from contextlib import suppress
from fnmatch import fnmatch
from http import HTTPStatus
from importlib.util import find_spec
from pathlib import Path
from time import monotonic, sleep
from typing import Any, BinaryIO, NamedTuple, TypeVar

from steadygpt.cli import UserError
from steadygpt.durable import replace_file, sha256_of
from steadygpt.progress import ProgressBar, say

Result = TypeVar("Result")
# How long requests are repeated without receiving anything: in a run with several ranks, the others wait 30 minutes.
PATIENCE_S = 25 * 60.0
FIRST_PATIENCE_S = 6.0  # until the Hub has answered once; perhaps there is no network
LONGEST_PAUSE_S = 60.0
SILENCE_S = 20  # a connection without data for so long is given up
READ_AHEAD = (2**20, 2**25)  # bytes requested by a reader that jumps, and at most by one that reads on

_answered = False  # the Hub has answered a request of this process


class Repo(NamedTuple):
    """A repository at a commit."""

    kind: str  # "dataset" or "model"
    name: str
    commit: str
    online: bool = True  # False: only what is in the cache can be read

    def __str__(self) -> str:
        return f"{'hf:' * (self.kind == 'dataset')}{self.name}"


class RepoFile(NamedTuple):
    """A file of a repository."""

    path: str
    size: int  # in bytes


class NoAnswer(UserError):
    """The network failed for longer than the retries last."""


class NotFound(UserError):
    """The Hub has no such repository, or this user may not read it."""


class Patience:
    """The retries of one request: whether to retry, the pause, and one line for each retry."""

    def __init__(self, what: object):
        self.what, self.pause_s, self.since = what, 1.0, monotonic()

    def received(self) -> None:
        """Start counting again, because data has arrived."""
        global _answered
        _answered = True
        self.pause_s, self.since = 1.0, monotonic()

    def wait(self, error: Exception) -> None:
        """Wait before the next retry.

        Raises: UserError, or an OSError of this machine such as a full disk, when a retry cannot help.
        """
        global _answered
        cause = _network_error(error)
        if cause is None:
            raise error if isinstance(error, UserError) or _is_local(error) else _refusal(self.what, error) from error
        pause_s = self.pause_s
        if (response := getattr(cause, "response", None)) is not None:
            _answered = True
            if (asked_s := response.headers.get("Retry-After", "")).isdigit():
                pause_s = max(pause_s, min(float(asked_s), PATIENCE_S))
        if monotonic() - self.since >= (PATIENCE_S if _answered else FIRST_PATIENCE_S):
            raise NoAnswer(f"{self.what}: no answer ({_brief(cause)}); check the network and run this again") from error
        say(f"{self.what}: {_brief(cause)}; trying again in {pause_s:.0f} s")
        sleep(pause_s)
        self.pause_s = min(2 * self.pause_s, LONGEST_PAUSE_S)


def persistently(what: object, action: Callable[[Patience], Result]) -> Result:
    """Return action(), retried while it fails because of the network.

    Raises: UserError that names `what`, when a retry cannot help; an OSError of this machine, such as a full disk.
    """
    patience = Patience(what)
    while True:
        try:
            result = action(patience)
        except Exception as error:  # each of the Hub's libraries raises its own types
            patience.wait(error)
        else:
            patience.received()
            return result


def _network_error(error: BaseException | None) -> BaseException | None:
    """Return the error, or what caused it, if it may pass: a lost connection, a server error, too many requests."""
    hopeless = {"UserError", "OfflineModeIsEnabled", "UnsupportedProtocol", "InvalidURL"}
    while error is not None and not hopeless & _kinds(error):
        if status := _status(error):
            return error if status in (408, 425, 429) or status >= 500 else None
        if _is_local(error):
            return None
        library = type(error).__module__.partition(".")[0]
        if isinstance(error, (ConnectionError, TimeoutError)) or library in ("httpx", "httpx2", "httpcore", "requests"):
            return error
        error = error.__cause__ or error.__context__
    return None


def _is_local(error: BaseException) -> bool:
    """Return whether an error is this machine's, such as a full disk."""
    is_network = isinstance(error, (ConnectionError, TimeoutError)) or _status(error)
    return isinstance(error, OSError) and error.errno is not None and not is_network


def _refusal(what: object, error: Exception) -> UserError:
    """Explain an error that will not pass."""
    kinds = _kinds(error)
    if "GatedRepoError" in kinds or "is a gated" in str(error):  # the latter is said by `datasets`
        return UserError(
            f"{what}: gated; accept its conditions on its page of the Hugging Face Hub, then run `hf auth login` or "
            "set HF_TOKEN to a token that may read it"
        )
    if "RevisionNotFoundError" in kinds:
        return UserError(f"{what}: no such revision on the Hugging Face Hub; check the part after @")
    if "RepositoryNotFoundError" in kinds or _status(error) in (401, 403):
        return NotFound(
            f"{what}: not found on the Hugging Face Hub, or not yours to read; check the name, and if it is private, "
            "run `hf auth login` or set HF_TOKEN"
        )
    if "OfflineModeIsEnabled" in kinds:
        return UserError(f"{what}: not in the cache, and HF_HUB_OFFLINE is set; unset it, or download it first")
    return UserError(f"{what}: {_brief(error)}; check the name, and run this again")


def _kinds(error: BaseException) -> set[str]:
    """Return the names of an error's classes: importing those of huggingface_hub takes a second."""
    return {kind.__name__ for kind in type(error).__mro__}


def _status(error: BaseException) -> int:
    """Return the HTTP status of an error, 0 if it has none."""
    return getattr(getattr(error, "response", None), "status_code", 0)


def _brief(error: BaseException) -> str:
    """Return an error in a few words."""
    if status := _status(error):
        return f"HTTP {status} {HTTPStatus(status).phrase if status in set(HTTPStatus) else ''}".rstrip()
    line = textwrap.shorten(str(error), 120, placeholder=" ...")
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


# ---------------------------------------------------------------------------------------------------------------------
# names -> repositories and their files


def find_repo(kind: str, name: str, revision: str = "", pinned: str = "") -> Repo:
    """Find the commit that a name on the Hub stands for; without a network, the one that is in the cache.

    Args:
        pinned: the commit to use, whatever the name stands for by now. If that is another one, a line says so.

    Raises: UserError when there is no such repository.
    """
    from huggingface_hub import HfApi, constants, snapshot_download, utils
    from huggingface_hub.errors import HFValidationError

    utils.logging.set_verbosity_error()  # its page of text for each retry; ours is one line
    utils.disable_progress_bars()
    utils.get_session().timeout = SILENCE_S  # of requests that set none
    what = Repo(kind, f"{name}{f'@{revision}' if revision else ''}", "")
    try:
        cached = snapshot_download(name, repo_type=kind, revision=pinned or revision or None, local_files_only=True)
        in_cache = Repo(kind, name, Path(cached).name, online=False)
    except HFValidationError as error:
        raise UserError(f"{what}: not a name on the Hugging Face Hub; expected NAME or OWNER/NAME") from error
    except OSError:
        in_cache = None
    if constants.HF_HUB_OFFLINE:
        if not in_cache:
            raise UserError(f"{what}: not in the cache, and HF_HUB_OFFLINE is set; unset it, or download it first")
        return in_cache
    try:
        info = persistently(what, lambda _: HfApi().repo_info(name, repo_type=kind, revision=revision or None))
    except NoAnswer:
        if not in_cache or pinned:  # a begun preparation needs the rest of the files
            raise
        print(f"{what}: no answer; using commit {in_cache.commit[:7]}, which is in the cache", file=sys.stderr)
        return in_cache
    commit = str(info.sha)
    # Models keep the name given, as in the caches of other programs: gpt2, not openai-community/gpt2.
    repo = Repo(kind, info.id if kind == "dataset" else name, pinned or commit)
    if info.id != name and revision != commit:
        print(f"{what}: {info.id} on the Hugging Face Hub", file=sys.stderr)
    if pinned and commit != pinned:
        print(
            f"{what}: now at commit {commit[:7]}; this preparation goes on with {pinned[:7]}, as it was begun",
            file=sys.stderr,
        )
    if revision != commit and not pinned:  # as hf_hub_download does, so that the name is found in the cache
        refs = _cache_folder(repo) / "refs" / (revision or "main")
        with suppress(OSError):  # a cache that cannot be written to may still be read
            refs.parent.mkdir(parents=True, exist_ok=True)
            replace_file(refs, lambda file: file.write(commit.encode()), durable=False)
    return repo


def data_files(repo: Repo, config: str, split: str) -> tuple[str, list[RepoFile]]:
    """Return the format of a data set, as `datasets` names it ("parquet", "json"), and the files of a split, in order.

    The format is "" for files outside of the repository.

    Raises: UserError when there is no such configuration or split.
    """
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()

    def resolve(_: Patience) -> tuple[str, Mapping]:
        if repo.online:
            builder = datasets.load_dataset_builder(repo.name, config or None, revision=repo.commit)
        else:
            builder = datasets.load_dataset_builder(str(_snapshot(repo)), config or None)
        return builder.name, builder.config.data_files or {}

    what = f"{repo}{f':{config}' if config else ''}"
    # Of the cache, `datasets` would take the files that are there for all of them.
    record = _cache_folder(repo) / "steadygpt" / f"{repo.commit}-{config or 'default'}-{split}.json"
    if not repo.online and record.exists():
        kind, found = json.loads(record.read_text())
        return kind, [RepoFile(path, size) for path, size in found]
    try:
        kind, files = persistently(what, resolve)
    except UserError as error:
        if repo.online:
            raise
        raise UserError(f"{what}: its files are not in the cache, and there is no network") from error
    if split not in files:
        found = ", ".join(map(str, files)) or "no files that `datasets` can read"
        raise UserError(f"{what}: no split {split!r}, found {found}; expected a data set that has it")
    base = f"@{repo.commit}/" if repo.online else f"{_snapshot(repo)}/"
    if not all(base in path for path in files[split]):  # the card refers to other places
        return "", [RepoFile(path, 0) for path in files[split]]
    sized = with_sizes(repo, [path.split(base, 1)[1] for path in files[split]])
    if repo.online:
        with suppress(OSError):
            record.parent.mkdir(parents=True, exist_ok=True)
            replace_file(record, lambda file: file.write(json.dumps([kind, sized]).encode()), durable=False)
    else:
        say(f"{what}: not listed in the cache, so only the {len(sized)} files in it are known")
    return kind, sized


def with_sizes(repo: Repo, paths: list[str]) -> list[RepoFile]:
    """Return files with their sizes, in the order of `paths`."""
    from huggingface_hub import HfApi

    if not repo.online:
        return [RepoFile(path, (_snapshot(repo) / path).stat().st_size) for path in paths]
    sizes: dict[str, int] = {}
    for first in range(0, len(paths), 500):

        def ask(_: Patience, part: list[str] = paths[first : first + 500]) -> list:
            return HfApi().get_paths_info(repo.name, part, repo_type=repo.kind, revision=repo.commit)

        sizes |= {file.path: file.size for file in persistently(repo, ask)}
    return [RepoFile(path, sizes[path]) for path in paths]


def _cache_folder(repo: Repo) -> Path:
    """Return the folder of a repository in the Hub's cache, whose layout is documented."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE, f"{repo.kind}s--{repo.name.replace('/', '--')}")


def _snapshot(repo: Repo) -> Path:
    return _cache_folder(repo) / "snapshots" / repo.commit


# ---------------------------------------------------------------------------------------------------------------------
# files -> bytes


def find_file(repo: Repo, path: str, folder: Path | None = None) -> Path | None:
    """Return where a file is, in the Hub's cache or in `folder`; None if it was not downloaded."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(repo.name, path, revision=repo.commit, repo_type=repo.kind)
    if isinstance(found, str):
        return Path(found)
    return folder / path if folder and (folder / path).exists() else None


def fetch(repo: Repo, path: str, folder: Path | None = None, progress: Callable[[int], object] = bool) -> Path:
    """Download a file unless it is there, and return where it is.

    Args:
        folder: for the file, under its path in the repository; None for the Hub's cache.
        progress: is called with the number of bytes that are there.

    Raises: UserError; OSError for errors of this machine, such as a full disk.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_download, hf_hub_url

    if found := find_file(repo, path, folder):
        return found
    if not repo.online:
        raise UserError(f"{repo}: {path} is not in the cache, and there is no network; run this again with one")
    url = hf_hub_url(repo.name, path, repo_type=repo.kind, revision=repo.commit)

    def attempt(patience: Patience) -> Path:
        metadata = get_hf_file_metadata(url, timeout=SILENCE_S)
        if metadata.etag is None or metadata.size is None:
            raise ConnectionError("an answer without size and ETag")
        # In the cache, hf_hub_download finds the file among the blobs and links it to the commit.
        target = folder / path if folder else _cache_folder(repo) / "blobs" / metadata.etag
        # Xet is faster, but does not resume from a partial file.
        if not (metadata.xet_file_data and not constants.HF_HUB_DISABLE_XET and find_spec("hf_xet")):
            _download(url, target, metadata.etag, metadata.size, patience, progress)
            if folder:
                return target
        try:
            found = hf_hub_download(repo.name, path, repo_type=repo.kind, revision=repo.commit, local_dir=folder)
        except RuntimeError as error:  # hf_xet's only type
            if "No space left" in str(error) or "os error 28" in str(error):
                raise OSError(errno.ENOSPC, "No space left on device", str(target)) from error
            raise ConnectionError(str(error)) from error
        return Path(found)

    found = persistently(f"{repo}/{path}", attempt)
    progress(found.stat().st_size)
    return found


def fetch_model(source: str, with_weights: bool) -> tuple[Path, Repo]:
    """Download config.json of the model NAME[@REVISION] and its safetensors; return their folder in the cache.

    Raises: as fetch.
    """
    from huggingface_hub import HfApi

    name, at, revision = source.partition("@")
    if at and not revision:
        raise UserError(f"{source}: no revision after @; expected NAME or NAME@REVISION")
    repo = find_repo("model", name, revision)
    folder = fetch(repo, "config.json").parent
    if not (with_weights and repo.online):
        return folder, repo
    paths = persistently(repo, lambda _: HfApi().list_repo_files(name, revision=repo.commit))
    # In one file or several; their index holds no further information.
    wanted = [path for path in paths if path == "model.safetensors"]
    wanted = wanted or [path for path in paths if fnmatch(path, "model-*.safetensors")]
    missing = with_sizes(repo, [path for path in wanted if not find_file(repo, path)])
    with ProgressBar(desc=source, total=sum(file.size for file in missing), unit="B", disable=not missing) as bar:
        for file in missing:
            fetch(repo, file.path, progress=bar.show_from(bar.n))
    return folder, repo


def _download(
    url: str, target: Path, etag: str, size: int, patience: Patience, progress: Callable[[int], object]
) -> None:
    """Download a file of the Hub, from where an earlier attempt or run ended."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.part")
    try:
        with open(part, "ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # another command may want the same file
            if target.exists():
                return
            if (have := file.seek(0, os.SEEK_END)) < size:
                _receive(url, have, size, file, patience, lambda count: progress(have + count))
            file.flush()
            os.fsync(file.fileno())
            if (found := file.tell()) < size:
                raise ConnectionError(f"the connection ended after {found:,} of {size:,} bytes")
            # The ETag of a large file is its SHA-256. The file may have been begun before the machine crashed.
            if found > size or (len(etag) == 64 and sha256_of(part) != etag):
                file.truncate(0)
                raise ConnectionError("damaged on the way")
            os.replace(part, target)
    except OSError as error:
        if _is_local(error) and error.filename is None:  # as after a write
            error.filename = str(part)
        raise


def _receive(
    url: str, start: int, end: int, file: BinaryIO, patience: Patience, progress: Callable[[int], object] = bool
) -> None:
    """Append the bytes [start, end) of a file of the Hub to `file`; after an error it holds what has arrived."""
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    headers = build_hf_headers() | {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
    with get_session().stream("GET", url, headers=headers, timeout=SILENCE_S) as response:
        hf_raise_for_status(response)
        skip = 0 if response.status_code == 206 else start  # the server may send the whole file instead
        count = 0
        for block in response.iter_bytes():
            block, skip = block[skip:], max(0, skip - len(block))
            block = block[: end - start - count]
            file.write(block)
            count += len(block)
            patience.received()
            progress(count)
            if count == end - start:
                return


class RemoteFile(io.RawIOBase):
    """A file of the Hub, read in place: a few requests for large blocks, each repeated until it succeeds."""

    def __init__(self, repo: Repo, file: RepoFile):
        from huggingface_hub import hf_hub_url

        self.name, self.size, self.position = f"{repo}/{file.path}", file.size, 0
        self.url = hf_hub_url(repo.name, file.path, repo_type=repo.kind, revision=repo.commit)
        self.block, self.block_start, self.ahead = b"", 0, READ_AHEAD[0]

    def readinto(self, buffer: Any) -> int:
        wanted = min(len(buffer), self.size - self.position)
        if wanted <= 0:
            return 0
        at = self.position - self.block_start
        if not 0 <= at < len(self.block):
            at, self.block = 0, self._fetch(wanted)
            self.block_start = self.position
        part = self.block[at : at + wanted]
        buffer[: len(part)] = part
        self.position += len(part)
        return len(part)

    def _fetch(self, wanted: int) -> bytes:
        """Return the bytes from the position on, at least `wanted`."""
        reads_on = 0 <= self.position - self.block_start - len(self.block) < READ_AHEAD[0]
        self.ahead = min(2 * self.ahead, READ_AHEAD[1]) if reads_on else READ_AHEAD[0]
        start, end = self.position, min(self.position + max(wanted, self.ahead), self.size)
        received = io.BytesIO()

        def attempt(patience: Patience) -> None:
            _receive(self.url, start + received.tell(), end, received, patience)
            if received.tell() < end - start:
                raise ConnectionError("the connection ended early")

        persistently(self.name, attempt)
        return received.getvalue()

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.position = offset + (0, self.position, self.size)[whence]
        return self.position

    def tell(self) -> int:
        return self.position

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True


def stream(repo: Repo, config: str, split: str) -> Any:
    """Return a split of a data set in any format that `datasets` reads, as an IterableDataset."""
    from datasets import load_dataset

    name, revision = (repo.name, repo.commit) if repo.online else (str(_snapshot(repo)), None)
    options: dict = {"split": split, "revision": revision, "streaming": True}
    return persistently(repo, lambda _: load_dataset(name, config or None, **options))
