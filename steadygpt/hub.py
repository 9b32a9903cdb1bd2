"""The Hugging Face Hub: data sets and models at one commit, downloaded or read in place, through network failures.

Beyond what huggingface_hub does, an interrupted download resumes from its partial file, also in a later run, and failed
requests are retried with growing pauses.
"""

import errno
import json
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from fnmatch import fnmatch
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from steadygpt import retry
from steadygpt.cli import UserError
from steadygpt.durable import replace_file, sha256_of
from steadygpt.progress import ProgressBar, say
from steadygpt.remote import RemoteFile, download
from steadygpt.retry import NoAnswer, Patience, Service, brief, kinds, status_of


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


class NotFound(UserError):
    """The Hub has no such repository, or this user may not read it."""


def _refusal(what: object, error: Exception) -> UserError:
    """Explain an error that will not pass."""
    names = kinds(error)
    if "GatedRepoError" in names or "is a gated" in str(error):  # the latter is said by `datasets`
        return UserError(
            f"{what}: gated; accept its conditions on its page of the Hugging Face Hub, then run `hf auth login` or "
            "set HF_TOKEN to a token that may read it"
        )
    if "RevisionNotFoundError" in names:
        return UserError(f"{what}: no such revision on the Hugging Face Hub; check the part after @")
    if "RepositoryNotFoundError" in names or status_of(error) in (401, 403):
        return NotFound(
            f"{what}: not found on the Hugging Face Hub, or not yours to read; check the name, and if it is private, "
            "run `hf auth login` or set HF_TOKEN"
        )
    if "OfflineModeIsEnabled" in names:
        return UserError(f"{what}: not in the cache, and HF_HUB_OFFLINE is set; unset it, or download it first")
    return UserError(f"{what}: {brief(error)}; check the name, and run this again")


HUB = Service(_refusal)
persistently = HUB.persistently


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
    utils.get_session().timeout = retry.SILENCE_S  # of requests that set none
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
        metadata = get_hf_file_metadata(url, timeout=retry.SILENCE_S)
        if metadata.etag is None or metadata.size is None:
            raise ConnectionError("an answer without size and ETag")
        # In the cache, hf_hub_download finds the file among the blobs and links it to the commit.
        target = folder / path if folder else _cache_folder(repo) / "blobs" / metadata.etag
        # Xet is faster, but does not resume from a partial file.
        if not (metadata.xet_file_data and not constants.HF_HUB_DISABLE_XET and find_spec("hf_xet")):
            is_whole = partial(_has_etag, metadata.etag)
            download(partial(_receive, url), target, metadata.size, is_whole, patience, progress)
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


def _has_etag(etag: str, path: Path) -> bool:
    """Return whether a file has the checksum in its ETag; of a small file, which has none there, True."""
    return len(etag) != 64 or sha256_of(path) == etag


def _receive(
    url: str, start: int, end: int, file: BinaryIO, patience: Patience, progress: Callable[[int], object] = bool
) -> None:
    """Append the bytes [start, end) of a file of the Hub to `file`, as remote.Receive."""
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    headers = build_hf_headers() | {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
    with get_session().stream("GET", url, headers=headers, timeout=retry.SILENCE_S) as response:
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


def open_in_place(repo: Repo, file: RepoFile) -> RemoteFile:
    """Open a file to read parts of it without a download."""
    from huggingface_hub import hf_hub_url

    url = hf_hub_url(repo.name, file.path, repo_type=repo.kind, revision=repo.commit)
    return RemoteFile(f"{repo}/{file.path}", file.size, partial(_receive, url), HUB)


def stream(repo: Repo, config: str, split: str) -> Any:
    """Return a split of a data set in any format that `datasets` reads, as an IterableDataset."""
    from datasets import load_dataset

    name, revision = (repo.name, repo.commit) if repo.online else (str(_snapshot(repo)), None)
    options: dict = {"split": split, "revision": revision, "streaming": True}
    return persistently(repo, lambda _: load_dataset(name, config or None, **options))
