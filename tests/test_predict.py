"""predict.py: the ladder, its time, interruptions and refusals; the answer, and the best size for a budget."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import TINY, write_data

import predict
from predict import POINTS, Ladder, Rung, scaled
from steadygpt.base.options import UserError
from steadygpt.checkpoint.files import EVALUATIONS
from steadygpt.config import TrainConfig, parse_args
from steadygpt.run.expected import Expected, Prediction

OF_DATA = ("--data_dir", "data", "--tokenizer", "bytes")
TARGET = [*TINY, *OF_DATA, "--embd_size", "96", "--max_steps", "4000"]  # of 2 layers and 2 heads
START_S = 3.0  # of every run of the stand-in
STOP_AT = {"number": 0}  # the run that Ctrl-C stops
DRAW = predict.draw  # which the fixture replaces


def law(size: float, tokens: float) -> float:
    return 1.0 + (size / 1e5) ** -0.3 + (tokens / 1e5) ** -0.4


@pytest.fixture
def ladders(tmp_path, monkeypatch) -> list[str]:
    """Data, and in place of training a stand-in whose losses follow a law; the list gets the runs that it "trains"."""
    monkeypatch.chdir(tmp_path)
    write_data(tmp_path / "data", (400, 40000))
    trained: list[str] = []

    def run(self: Ladder, rung: Rung, flags) -> float:
        folder = self.folder / str(rung)
        folder.mkdir(parents=True)
        trained.append(str(rung))
        if len(trained) == STOP_AT["number"]:
            folder.rmdir()
            raise KeyboardInterrupt
        every = max(1, rung.steps // POINTS)
        steps = sorted({*range(every, rung.steps + 1, every), rung.steps})
        losses = {
            step: {"val_loss": law(rung.size, step * 64), "val_bpb": 2 * law(rung.size, step * 64)} for step in steps
        }
        (folder / EVALUATIONS).write_text(json.dumps(losses))
        step_s = rung.size * 2e-7 + 0.002  # small models are less efficient
        (folder / "status.json").write_text(json.dumps({"status": "finished"}))
        return START_S + rung.steps * step_s

    monkeypatch.setattr(Ladder, "step_s", lambda _, rung: rung.size * 2e-7 + 0.002)
    monkeypatch.setattr(Ladder, "run", run)
    monkeypatch.setattr(predict, "draw", lambda *_: "not drawn")  # which takes longer than all else
    predict.curve_of.cache_clear()
    return trained


def state() -> dict:
    return json.loads(Path("data/ladder/ladder.json").read_text())


def test_the_answer_is_near_the_law_and_is_a_prediction_for_the_run(ladders, capsys, monkeypatch):
    monkeypatch.setattr(predict, "draw", DRAW)
    predict.main([*TARGET, "--minutes", "100"])
    said = capsys.readouterr().out
    found = Prediction(**json.loads(Path("data/prediction.json").read_text()))
    assert len(found.curve) == POINTS and [step for step, *_ in found.curve] == list(range(100, 4001, 100))
    size = predict.size_of(TrainConfig(**{**found.options, "embd_size": 96}))
    for step, loss, low, high in found.curve:
        assert low < loss < high
        assert loss == pytest.approx(law(size, step * 64), rel=0.02)
    _, loss, low, high = found.curve[-1]
    assert f"loss         {loss:.3f}, in 9 of 10 cases {low:.3f} to {high:.3f}\n" in said
    assert f"bits/byte    {2 * loss:.3f}, {2 * low:.3f} to {2 * high:.3f}\n" in said
    assert "caution" not in said
    assert "12 runs, 16 to 48 wide, up to 4,000 steps" in said
    assert Path("data/prediction.svg").read_text().count("<svg") == 1
    assert Expected(found).compare(4000, loss)[1] == ""


@pytest.mark.parametrize("minutes", [2.0, 5.0, 10.0])
def test_the_ladder_takes_the_minutes_that_it_is_given(ladders, minutes):
    predict.main([*TARGET, "--minutes", f"{minutes}", "--max_steps", "1000000"])
    assert sum(state()["seconds"].values()) == pytest.approx(60 * minutes, rel=0.1)
    assert state()["steps"] == sorted(state()["steps"]) and len(state()["steps"]) == 4


def test_a_short_ladder_says_what_it_does_not_know(ladders, capsys):
    predict.main([*TARGET, "--minutes", "2", "--max_steps", "1000000"])
    said = capsys.readouterr().out
    assert "more than 30 times the ladder's FLOPs: an interval twice as wide" in said
    assert "times the steps of the ladder, which knows nothing of later ones" in said


def test_an_interrupted_ladder_continues_with_the_run_that_was_cut_off(ladders, monkeypatch):
    predict.main([*TARGET, "--minutes", "100", "--ladder", "whole"])
    whole, answer = list(ladders), Path("whole/prediction.json").read_text()
    ladders.clear()
    for number in (1, 4, 9):
        monkeypatch.setitem(STOP_AT, "number", number)
        with pytest.raises(KeyboardInterrupt):
            predict.main([*TARGET, "--minutes", "100"])
    monkeypatch.setitem(STOP_AT, "number", 0)
    predict.main([*TARGET, "--minutes", "100"])
    assert [*dict.fromkeys(ladders)] == whole
    assert Path("data/prediction.json").read_text() == answer
    ladders.clear()
    predict.main(TARGET)  # without --minutes: nothing is left to train
    assert not ladders
    assert Path("data/prediction.json").read_text() == answer


def test_more_minutes_extend_a_ladder(ladders):
    predict.main([*TARGET, "--minutes", "2", "--max_steps", "1000000"])
    before, trained = state(), len(ladders)
    predict.main([*TARGET, "--minutes", "6", "--max_steps", "1000000"])
    assert state()["steps"][:4] == before["steps"] and len(state()["steps"]) == 5
    assert sum(state()["seconds"].values()) == pytest.approx(360, rel=0.1)
    assert len(ladders) == trained + 4


def test_a_ladder_ends_early_if_a_round_took_too_long(ladders, monkeypatch):
    run = Ladder.run
    monkeypatch.setattr(
        Ladder, "run", lambda ladder, rung, flags: run(ladder, rung, flags) * (9 if rung.steps > 400 else 1)
    )
    predict.main([*TARGET, "--minutes", "3", "--max_steps", "1000000"])
    steps = state()["steps"]
    assert len(steps) < 4 and steps == sorted({*steps})


@pytest.mark.parametrize("preset", [path.stem for path in predict.Path(predict.__file__).parent.glob("configs/*.toml")])
def test_every_preset_but_the_smallest_has_a_ladder(preset, tmp_path):
    config = replace(parse_args([f"--config={preset}"])[0], max_steps=1000)
    widths = [shape.embd_size / config.embd_size for shape, _ in Ladder(config, {}, tmp_path).shapes]
    assert widths == sorted({*widths}) and widths[0] >= 0.1 and widths[-1] <= 0.51


def test_a_run_whose_folder_was_removed_is_trained_again(ladders):
    predict.main([*TARGET, "--minutes", "10"])
    ladders.clear()
    damaged = f"width-24-steps-{state()['steps'][-1]}"
    file = Path("data/ladder", damaged, EVALUATIONS)
    for content in ("{}", '{"3": {"val_loss": 2}}', "[", '{"4000": {}}'):
        file.write_text(content)
        predict.curve_of.cache_clear()
        with pytest.raises(UserError, match=f"remove data/ladder/{damaged}$"):
            predict.main(TARGET)
    shutil.rmtree(file.parent)
    with pytest.raises(UserError, match=f"data/ladder/{damaged}: not trained yet; give --minutes"):
        predict.main(TARGET)
    predict.main([*TARGET, "--minutes", "10"])
    assert ladders == [damaged]


REFUSED = [
    ([], "data/ladder: no ladder is there; give the --minutes that it may take"),
    (["--minutes=0.2"], "--minutes 0.2: too few; expected at least "),
    (["--minutes=9", "--embd_size=32"], "--embd_size 32: too narrow for a ladder; expected 48 or more"),
    (["--minutes=9", "--resume=latest"], "--resume: expected the options of a new run"),
    (["--minutes=9", "--data_dir=none"], "none: found no shards to train and validate on"),
    (
        ["--minutes=9", "--gpu_hours=1", "--gpu=abacus"],
        "--gpu abacus: no such GPU; expected a part of one of NVIDIA B200",
    ),
    (["--minutes=9", "--gpu=H100"], "--gpu needs --gpu_hours"),
    (["--minutes=9", "--dry_run"], "--dry_run: expected the options of a new run"),
    (["--minutes=9", "--gpu_hours=1e9"], "times the ladder's FLOPs; expected at most 10,000. Train a longer one"),
    (["--minutes=9", "--gpu_hours=1e-12"], "--gpu_hours 1e-12: too few for 40 steps of the narrowest model"),
]


@pytest.mark.parametrize(("flags", "line"), REFUSED)
def test_refusals(ladders, flags, line):
    with pytest.raises(UserError) as refused:
        predict.main([*TARGET, *flags])
    assert line in str(refused.value)


def test_a_mixture_needs_a_folder_for_its_ladder(ladders):
    with pytest.raises(UserError, match="--mix needs --ladder FOLDER"):
        predict.main([*TINY, "--mix=data", "--minutes=9"])
    predict.main([*TINY, "--mix=data", "--embd_size=96", "--max_steps=400", "--minutes=9", "--ladder=mixed"])
    assert Path("mixed/prediction.json").exists()


def test_a_ladder_of_another_run_is_refused(ladders):
    predict.main([*TARGET, "--minutes", "10", "--ladder", "data/ladder"])
    write_data(Path("other"), (400, 40000), seed=1)
    write_data(Path("bare"), (400, 40000), seed=2).joinpath("manifest.json").unlink()
    for flags, line in (
        (["--max_lr=3e-3"], "(max_lr 0.001 -> 0.003); give another --ladder"),
        (["--seed=3"], "(seed 1337 -> 3); give another --ladder"),
        (["--data_dir=other"], "(data [("),
        (["--data_dir=bare"], "(data [("),
        (["--val=other"], "(validation ["),
    ):
        with pytest.raises(UserError) as refused:
            predict.main([*TARGET, "--minutes=10", "--ladder=data/ladder", *flags])
        assert str(refused.value).startswith(f"data/ladder: is the ladder of another run {line}")


def test_the_best_size_loses_nothing_to_its_neighbours(ladders, capsys):
    predict.main([*TARGET, "--minutes", "100"])
    capsys.readouterr()
    predict.main([*TARGET, "--gpu_hours", "1e-4", "--gpu", "h200", "--gpu_hour_cost", "2e4"])
    budget, *rows = capsys.readouterr().out.splitlines()
    assert budget.startswith("budget       0.0001 h of one NVIDIA H200 at 40% of its peak, ")
    assert budget.endswith("; 2.00 at 20,000.00 per hour")
    assert [row.split()[0] for row in rows[:3]] == ["instead", "best", "instead"]
    losses = [float(row.partition(": loss ")[2].split()[0]) for row in rows[:3]]
    assert losses[1] == min(losses)
    for row, loss in zip(rows[:3], losses, strict=True):
        lost = float(row.rpartition("), ")[2] or 0) if "), " in row.partition(": loss ")[2] else 0.0
        assert lost == pytest.approx(loss - losses[1], abs=0.0011)
    assert "EPOCHS, of little benefit beyond 4" in rows[1]


@pytest.mark.parametrize(
    ("options", "width", "heads", "kv_heads", "mlp"),
    [
        ({"embd_size": 768, "num_heads": 12}, 128, 2, 0, 0),
        ({"embd_size": 768, "num_heads": 6}, 192, 2, 0, 0),
        ({"embd_size": 768, "num_heads": 12, "num_kv_heads": 4}, 384, 6, 2, 0),
        ({"embd_size": 96, "num_heads": 6, "num_kv_heads": 2}, 32, 2, 1, 0),
        ({"embd_size": 64, "num_heads": 64}, 8, 8, 0, 0),
        ({"embd_size": 64, "num_heads": 64, "rotary_pct": 1}, 8, 4, 0, 0),
        ({"embd_size": 256, "num_heads": 8, "rotary_pct": 0.25}, 80, 2, 0, 0),
        ({"embd_size": 100, "num_heads": 4}, 25, 1, 0, 0),
        ({"embd_size": 384, "num_heads": 6, "intermediate_size": 1024}, 96, 2, 0, 256),
        ({"embd_size": 64, "num_heads": 4, "head_dim": 32}, 16, 1, 0, 0),
    ],
)
def test_a_narrower_run_has_heads_of_about_the_same_size(options, width, heads, kv_heads, mlp):
    shape = scaled(TrainConfig(**options), width, 3)
    assert (shape.num_heads, shape.num_kv_heads, shape.intermediate_size) == (heads, kv_heads, mlp)
    shape.check_shape()
    assert shape.num_layers == 3


def test_a_run_of_the_ladder_is_that_of_train_py(tmp_path, monkeypatch):
    """With the target's flags, its own shape and length, and nothing that the target does besides."""
    monkeypatch.chdir(tmp_path)
    write_data(tmp_path / "data", (400, 4000))
    target = TrainConfig(
        embd_size=64,
        vocab_size=257,
        context_length=16,
        total_batch_size=64,
        eval_tokens=32,
        max_steps=8,
        warmup_steps=2,
    )
    ladder = Ladder(target, {}, tmp_path / "ladder")
    rung = Rung(scaled(target, 16, 2), 1.0, 8)
    seconds = ladder.run(rung, [*TINY, *OF_DATA, "--sample_freq=2", "--eval_freq=4"])
    assert seconds > 0
    assert list(ladder.curve(rung)) == list(range(1, 9))
    assert all(loss > 0 and bits > 0 for loss, bits in ladder.curve(rung).values())
    said = (tmp_path / "ladder/width-16-steps-8/out.txt").read_text()
    assert "sample" not in said and "2 layers, 1 head" not in said and "16 wide" in said
    with pytest.raises(
        UserError, match=r"width-16-steps-9: the run ended with status 2: error: unknown argument '--x'"
    ):
        ladder.run(Rung(rung.config, 1.0, 9), ["--x"])
