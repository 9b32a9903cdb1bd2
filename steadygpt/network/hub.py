"""The Hugging Face Hub: the files of a data set at one commit, and models in the Hub's cache."""

from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypedDict

from steadygpt.base import retry
from steadygpt.base.durable import replace_file
from steadygpt.base.foreign import ADAPTER, what_it_is
from steadygpt.base.options import UserError
from steadygpt.base.progress import say
from steadygpt.base.retry import NoAnswer, Service, brief, kinds, status_of
from steadygpt.base.typed import FileName, read_json
from steadygpt.network.stores import RemoteFile

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"  # of a model in one file, or in several
# Files of a model besides weights and tokenizer.json: how texts end, and how chats are formatted.
KEPT_FILES = (
    "generation_config.json", "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json",
    "chat_template.jinja",
)  # fmt: skip
CONVERTED = "refs/convert/parquet"  # the revision with the Hub's own copy of a data set in Parquet


class _Index(TypedDict):
    weight_map: dict[str, FileName]  # name of a weight -> its file, in the same folder


class Repo(NamedTuple):
    """A repository at a commit."""

    kind: str  # "dataset" or "model"
    name: str
    commit: str
    online: bool = True  # False: only files in the cache can be read

    def __str__(self) -> str:
        return f"hf:{self.name}" if self.kind == "dataset" else self.name

    @property
    def cache(self) -> Path:
        """The repository's folder in the Hub's cache, whose layout is documented."""
        from huggingface_hub import constants

        return Path(constants.HF_HUB_CACHE, f"{self.kind}s--{self.name.replace('/', '--')}")

    @property
    def snapshot(self) -> Path:
        """The folder of the commit in the cache. It contains files, or links to the blobs of other programs."""
        return self.cache / "snapshots" / self.commit


class NotFound(UserError):
    """No repository of this name can be read, so the name may be a mistyped path."""


def _refusal(subject: object, error: Exception) -> UserError:
    """Explain an error that a retry cannot help."""
    names = kinds(error)
    if "GatedRepoError" in names or "is a gated" in str(error):  # the message of `datasets`
        return UserError(
            f"{subject}: gated; accept its conditions on its page on the Hugging Face Hub, then run `hf auth login` or "
            "set HF_TOKEN to a token with access"
        )
    if "RevisionNotFoundError" in names:
        return UserError(f"{subject}: no such revision on the Hugging Face Hub; check the part after @")
    if "RepositoryNotFoundError" in names or status_of(error) in (401, 403):
        return NotFound(
            f"{subject}: not found on the Hugging Face Hub, or private; check the name, and for a private one "
            "run `hf auth login` or set HF_TOKEN"
        )
    if status_of(error) == 404:
        return UserError(f"{subject}: no such file on the Hugging Face Hub; check the name, then run this again")
    if "OfflineModeIsEnabled" in names:
        return NotFound(f"{subject}: not in the cache, and HF_HUB_OFFLINE is set; unset it, or download it first")
    return UserError(f"{subject}: {brief(error)}; check the name, then run this again")


HUB = Service(_refusal)
persistently = HUB.persistently


# ---------------------------------------------------------------------------------------------------------------------
# names -> repositories and their files


def find_repo(kind: str, spec: str) -> Repo:
    """Find the commit that NAME[@REVISION] on the Hub refers to; without a network, the cached commit."""
    from huggingface_hub import HfApi, constants, snapshot_download, utils
    from huggingface_hub.errors import HFValidationError

    utils.logging.set_verbosity_error()  # huggingface_hub prints a page for each retry; we print a line
    subject = Repo(kind, spec, "")
    name, separator, revision = spec.partition("@")
    if not name or (separator and not revision):
        raise UserError(f"'{subject}' is incomplete; expected NAME or NAME@REVISION, such as Qwen/Qwen3-0.6B")
    try:
        cached = snapshot_download(name, repo_type=kind, revision=revision or None, local_files_only=True)
        in_cache = Repo(kind, name, Path(cached).name, online=False)
    except HFValidationError as error:
        raise NotFound(f"{subject}: not a name on the Hugging Face Hub; expected NAME or OWNER/NAME") from error
    except OSError:
        in_cache = None
    if constants.HF_HUB_OFFLINE and in_cache:
        return in_cache
    try:
        ask = partial(HfApi().repo_info, name, repo_type=kind, revision=revision or None, timeout=retry.SILENCE_S)
        info = persistently(subject, ask)
    except NoAnswer:
        if not in_cache:
            raise
        say(f"{subject}: no answer; using commit {in_cache.commit[:7]}, which is in the cache")
        return in_cache
    commit = str(info.sha)
    # Models keep the name that the user gave, as in the caches of other programs: gpt2, not openai-community/gpt2.
    repo = Repo(kind, info.id if kind == "dataset" else name, commit)
    if info.id != name and revision != commit:
        say(f"{subject}: {info.id} on the Hugging Face Hub")
    if revision != commit:  # so that the name is found in the cache, also by other programs
        refs = repo.cache / "refs" / (revision or "main")
        with suppress(OSError):  # a cache that cannot be written to may still be read
            refs.parent.mkdir(parents=True, exist_ok=True)
            replace_file(refs, lambda file: file.write(commit.encode()), durable=False)
    return repo


def data_files(spec: str, config: str, pinned: str = "") -> tuple[str, list[RemoteFile]]:
    """Find the files of the train split of a data set NAME[@REVISION], in Parquet, JSON Lines or text.

    Args:
        pinned: the commit to use, even if the name now refers to another one.

    Returns: the commit, and the files in the order of `datasets`.
    """
    import datasets
    from huggingface_hub import HfApi, HfFileSystem

    fs = HfFileSystem()  # its cached listings, shared with `datasets`, stay valid, because a commit does not change
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    name, separator, revision = spec.partition("@")
    subject = f"hf:{spec}:{config}" if config else f"hf:{spec}"
    if not name or (separator and not revision):
        raise UserError(f"'{subject}' is incomplete; expected NAME or NAME@REVISION, such as roneneldan/TinyStories")
    ask = partial(HfApi().dataset_info, timeout=retry.SILENCE_S)
    info = persistently(subject, partial(ask, name, revision=pinned or revision or None))
    name, commit = info.id, str(info.sha)
    builder = persistently(subject, partial(datasets.load_dataset_builder, name, config or None, revision=commit))
    splits = builder.config.data_files or {}
    if "train" not in splits:
        names = ", ".join(map(str, splits)) or "no files that `datasets` can read"
        raise UserError(f"{subject}: no split 'train', found {names}; expected a data set with this split")
    urls, source = [*splits["train"]], commit
    # `datasets` before 5.1 accepts a card that names files elsewhere.
    is_elsewhere = any(not url.startswith(f"hf://datasets/{name}@{commit}/") for url in urls)
    if is_elsewhere or builder.name not in ("parquet", "json", "text"):
        say(f"{subject}: found {builder.name}; reading the Hub's copy of it in Parquet, @{CONVERTED}")
        subject = f"hf:{name}@{CONVERTED}"
        source = str(persistently(subject, partial(ask, name, revision=CONVERTED)).sha)
        folder = f"{builder.config.name}/train"
        find = partial(fs.find, f"datasets/{name}@{source}/{folder}")
        urls = [f"hf://{path}" for path in persistently(subject, find)]
        if not urls:
            raise UserError(f"{subject}: found no files in {folder}/; expected a copy in Parquet, which the Hub makes")
    sizes = persistently(subject, lambda: [fs.info(url)["size"] for url in urls])
    return commit, [
        RemoteFile(url, size, source, HUB, partial(_request, url)) for url, size in zip(urls, sizes, strict=True)
    ]


def _request(path: str, start: int, end: int) -> bytes:
    """Request the bytes [start, end) of a file once; HfFileSystem.cat_file() retries without a report."""
    from huggingface_hub import HfFileSystem
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    headers = build_hf_headers() | {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
    response = get_session().get(HfFileSystem().url(path), headers=headers, timeout=retry.SILENCE_S)
    hf_raise_for_status(response)
    return response.content


def fetch(repo: Repo, path: str) -> Path:
    """Download a file to the Hub's cache unless the cache has it, and return its path.

    Several files are downloaded one after the other, because the threads of snapshot_download continue after Ctrl-C.

    Raises: UserError; OSError for errors of this machine, such as a full disk.
    """
    from huggingface_hub import hf_hub_download

    target = repo.snapshot / path
    if target.exists():
        return target
    if not repo.online:
        raise UserError(f"{repo}: {path} is not in the cache, and there is no network; connect, then run this again")
    download = partial(hf_hub_download, repo.name, path, repo_type=repo.kind, revision=repo.commit)
    try:
        return Path(persistently(f"{repo}/{path}", download))
    except OSError as error:
        error.filename = error.filename or str(repo.cache)  # errors of writes name no file
        raise


def read_table(name: str, path: str) -> list[dict]:
    """Return the rows of a Parquet file of a small data set, NAME[@REVISION]; the file stays in the cache."""
    import pyarrow.parquet as pq

    file = fetch(find_repo("dataset", name), path)
    try:
        return pq.read_table(file).to_pylist()
    except (ValueError, OSError) as error:
        raise UserError(f"{file}: cannot be read ({brief(error)}); remove it, then run this again") from error


def fetch_model(source: str, with_weights: bool) -> tuple[Path, Repo]:
    """Download a model NAME[@REVISION]: config.json, its tokenizer.json or vocab.json, KEPT_FILES and its safetensors.

    Returns: the folder of these files in the cache, and the repository.
    """
    from huggingface_hub import HfApi

    repo = find_repo("model", source)
    if not repo.online:
        return fetch(repo, "config.json").parent, repo
    ask = partial(HfApi().model_info, repo.name, revision=repo.commit, timeout=retry.SILENCE_S)
    paths = {file.rfilename for file in persistently(repo, ask).siblings or []}
    if ADAPTER in paths:
        raise UserError(f"{source}: {what_it_is(Path(repo.name, ADAPTER))}")
    folder = fetch(repo, "config.json").parent
    tokenizer_files = [name for name in ("tokenizer.json", "vocab.json") if name in paths][:1]
    text_files = [name for name in KEPT_FILES if name in paths]
    for path in [*tokenizer_files, *text_files]:
        fetch(repo, path)
    if not with_weights or not {WEIGHTS, INDEX} & paths:
        return folder, repo
    if WEIGHTS not in paths:
        fetch(repo, INDEX)
    for file in weight_files(folder):
        fetch(repo, str(file.relative_to(folder)))
    return folder, repo


def weight_files(folder: Path) -> list[Path]:
    """Return the files with the weights of a model: model.safetensors, or the files that its index names."""
    index = folder / INDEX
    if (folder / WEIGHTS).exists() or not index.exists():
        return [folder / WEIGHTS]
    stored = read_json(index, _Index, "expected the file of each weight; copy it again")
    return sorted({folder / name for name in stored["weight_map"].values()})
