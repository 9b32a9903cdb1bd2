"""The network goes in the middle of a download: training goes on, or one line says what to do without a network."""

import http.server
import os
import threading
from functools import partial
from pathlib import Path

import pytest
from conftest import load, write_data
from harness import Life, folders, refused, whole_life
from injected import no_tokenizer

prepare = {"program": "prepare_dataset", "tiny": ()}


@pytest.fixture
def dying_network(workdir):
    """The environment in which every download ends in its middle."""

    class Dying(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_response(200)
            self.send_header("Content-Length", "100000")
            self.end_headers()

        def do_GET(self):
            self.do_HEAD()
            self.wfile.write(b"{" + bytes(1000))

        def do_CONNECT(self):
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Dying)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    caches = {name: str(workdir / "cache") for name in ("HF_HOME", "TIKTOKEN_CACHE_DIR", "XDG_CACHE_HOME")}
    yield partial(set_environment, {"HF_ENDPOINT": address, "HTTPS_PROXY": address, "NO_PROXY": "127.0.0.1", **caches})
    server.shutdown()


def set_environment(changes: dict, rank: int) -> None:
    for name in ("http_proxy", "https_proxy", "no_proxy", "HF_HUB_OFFLINE"):
        os.environ.pop(name, None)
    os.environ.update(changes)


def test_hellaswag_and_samples(dying_network):
    write_data(Path("data"), tokenizer="r50k_base", vocab_size=50257)
    flags = ("--hellaswag_freq", "4", "--sample_freq", "4", *folders("run"))
    text = whole_life(*flags, faults=[dying_network])
    assert text.count("warning: ") == 1 and "finished after 8 steps" in text
    assert "warning: no samples and no HellaSwag in this run: the vocabulary of 'r50k_base' could not be downl" in text
    assert load("run/ckpt/latest.pt")["step"] == 8


@pytest.mark.parametrize("ranks", [1, 2])
def test_hellaswag(dying_network, ranks):
    text = whole_life("--hellaswag_freq", "4", *folders("run"), ranks=ranks, faults=[dying_network])
    assert text.count("warning: ") == 1 and "finished after 8 steps" in text
    assert "warning: no HellaSwag in this run: hf:Rowan/hellaswag: cannot be read, " in text
    assert "or give its file with --hellaswag_file" in text


@pytest.mark.parametrize("rank", [0, 1])
def test_a_tokenizer_that_one_rank_cannot_have(workdir, rank):
    """As on another machine: the ranks agree to do without."""
    flags = ("--sample_freq", "4", "--hellaswag_freq", "4", "--timeout_minutes", "0.2")
    text = whole_life(*flags, *folders("run"), ranks=2, faults=[partial(no_tokenizer, rank)])
    assert text.count("warning: no samples and no HellaSwag in this run: ") == 1 and "finished after 8 steps" in text


def test_a_tokenizer(dying_network):
    Path("text.txt").write_text("some text")
    flags = ("--source", "text.txt", "--tokenizer", "r50k_base")
    message = refused(*flags, **prepare, faults=[dying_network])
    assert "the vocabulary of 'r50k_base' could not be downloaded" in message and "use --tokenizer bytes" in message


def test_a_data_set_of_the_hub(dying_network):
    message = refused("--source", "hf:some/corpus", "--tokenizer", "bytes", **prepare, faults=[dying_network])
    assert (
        "hf:some/corpus: cannot be read, " in message and "check the name and the network (files need none)" in message
    )


def test_weights_of_the_hub(dying_network):
    message = refused("--init_from", "gpt2", *folders("run"), faults=[dying_network])
    assert "gpt2" in message and "network" in message


def stream_that_ends(rows: int | None, rank: int) -> None:
    """Let the Hub's stream of 20,000 documents break off after so many."""
    import datasets

    import prepare_dataset

    def documents():
        for number in range(20_000):
            if number == rows:
                raise ConnectionError("('Connection aborted.', RemoteDisconnected('closed without response'))")
            yield {"text": f"document {number} " * 20}

    prepare_dataset.load_hub = lambda *args, **kwargs: datasets.IterableDataset.from_generator(documents)


def test_a_stream_of_the_hub_that_breaks_off_is_continued(workdir):
    flags = ("--source", "hf:some/corpus", "--tokenizer", "bytes", "--streaming", "--shard_size", "300000")
    whole = Life(*flags, "--out", "whole", **prepare, faults=[partial(stream_that_ends, None)])
    assert whole.wait() == [0], whole.text()
    for rows in (5000, 12000):
        message = refused(*flags, "--out", "out", **prepare, faults=[partial(stream_that_ends, rows)])
        assert "ConnectionError: ('Connection aborted.'" in message and "and run this again" in message
    assert Life(*flags, "--out", "out", **prepare, faults=[partial(stream_that_ends, None)]).wait() == [0]
    names = sorted(path.name for path in Path("whole").iterdir() if path.name != ".lock")
    assert len(names) > 10
    assert all(Path("whole", name).read_bytes() == Path("out", name).read_bytes() for name in names)
