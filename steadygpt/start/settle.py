"""The options of a run and of a launch, some of which data, machine and length decide at each launch."""

from dataclasses import replace
from typing import NamedTuple, cast

from optim import cooldown_start, learning_rate
from steadygpt.base.text import counted, labelled
from steadygpt.checkpoint.files import STABLE
from steadygpt.config import FINEWEB_EDU_TOKENS, TrainConfig
from steadygpt.machine.device import choose_precision, memory_bytes
from steadygpt.machine.ranks import Ranks
from steadygpt.run.schedule import with_steps
from steadygpt.start.data import Data, by_name, mixture_text
from steadygpt.start.find import Start

SAMPLED_IDS = 2**20  # read from a shard without a manifest, to check that they look like GPT-2's


class Settled(NamedTuple):
    """The options of a run, with every choice that the data, the machine or the length of the run decides."""

    of_run: TrainConfig  # the requested options, and values for the whole run; checkpoints store it
    of_launch: TrainConfig  # also values for this launch: rows per micro-step, number of steps
    notes: list[str]  # lines for the plan about surprising choices


def settle(start: Start, asked: TrainConfig, data: Data, ranks: Ranks) -> Settled:
    """Settle the options on rank 0, for all ranks."""
    memory = 0  # of the rank that has least
    if not asked.mini_batch_size:
        memory = min(ranks.gather(memory_bytes(ranks.device)))
    settled = None
    with ranks.sharing_errors():
        if ranks.is_main:
            of_run, notes_of_run = for_run(start, asked, data, ranks)
            of_launch, notes = for_launch(start, of_run, data, memory, ranks)
            settled = Settled(of_run, of_launch, notes_of_run + notes)
    return cast(Settled, ranks.broadcast(settled))


def for_run(start: Start, asked: TrainConfig, data: Data, ranks: Ranks) -> tuple[TrainConfig, list[str]]:
    """Return the options with precision, tokenizer, vocabulary and tokens of a step, and lines for the plan."""
    notes = []
    world_size = ranks.world_size
    asked.check_together()
    asked.ranks_per_copy(world_size)
    config = replace(
        asked,
        precision=choose_precision(asked.precision, ranks.device),
        tokenizer=data.tokenizer_record.tokenizer,
        vocab_size=data.vocab_size,
    )
    if config.micro_steps and not start.checkpoint:
        config = config.with_tokens_of_step(world_size)
    elif config.micro_steps:
        tokens_of_micro_step = config.mini_batch_size * config.context_length * world_size
        if config.micro_steps * tokens_of_micro_step != config.total_batch_size:
            text = f"--micro_steps {config.micro_steps}; the run has {config.total_batch_size:,} tokens per step"
            notes.append(labelled("ignored", text))
    if asked.tokenizer == "auto" and not start.checkpoint:
        note = note_of_vocabulary(data)
        notes += [note] if note else []
    if start.data and start.data["phase"] != data.phase:
        before = mixture_text(start.data["sources"], start.data["phase"].shares)
        now = mixture_text(by_name(data.sources), data.phase.shares)
        notes.append(labelled("changed", f"training data: {before} -> {now}"))
    return config, notes


def for_launch(
    start: Start, of_run: TrainConfig, data: Data, memory: int, ranks: Ranks
) -> tuple[TrainConfig, list[str]]:
    """Return the options with rows per micro-step and number of steps, and lines for the plan.

    Args:
        memory: bytes of the rank that has least, for --mini_batch_size auto.
    """
    notes = []
    world_size = ranks.world_size
    config = of_run.with_even_rows(world_size)
    if not config.mini_batch_size:
        from steadygpt.start.memory import with_fitting_rows

        config, note = with_fitting_rows(config, memory, ranks)
        notes.append(note)
    elif config.mini_batch_size != of_run.mini_batch_size:
        where = f"each of {world_size} ranks" if world_size > 1 else "1 rank"
        text = f"{config.mini_batch_size} per micro-step instead of --mini_batch_size {of_run.mini_batch_size}"
        text += f": a step has {counted(config.rows_per_step // world_size, 'row')} on {where}"
        notes.append(labelled("rows", text))
    has_length = config.max_steps or config.tokens_per_parameter or config.steps_per_epoch
    if not (data.sources or config.mix or has_length):
        config = replace(config, steps_per_epoch=max(1, FINEWEB_EDU_TOKENS // config.total_batch_size))
    rows = rows_per_epoch(config, data)
    config = with_steps(config, rows, start.state.step, start.state.rows_consumed)
    return config, notes + notes_of_rates(config, start, rows)


def rows_per_epoch(config: TrainConfig, data: Data) -> int:
    """Return the rows of an epoch; 0 for a mixture, or after a change of the data, because such a run has no epochs."""
    is_mixture = len(data.sources) > 1 or bool(config.mix and not data.sources)
    if is_mixture or data.phase.number > 0:
        return 0
    if config.steps_per_epoch or not data.sources:
        return config.steps_per_epoch * config.rows_per_step
    return data.sources[0].rows.rows_per_epoch


def note_of_vocabulary(data: Data) -> str:
    """Return a warning if shards without a manifest, which are assumed to have GPT-2's ids, have only small ids."""
    if not data.sources or data.tokenizer_record.tokenizer != "gpt2" or data.sources[0].shards.manifest:
        return ""
    largest = int(data.sources[0].shards.shards[0].tokens()[:SAMPLED_IDS].max(initial=0))
    if largest >= data.vocab_size // 2:
        return ""
    text = f"taken to be GPT-2's, but the largest of the first ids is {largest:,}"
    return labelled("vocabulary", f"{text}; name the tokenizer that wrote them: --tokenizer NAME, or ids:N")


def notes_of_rates(config: TrainConfig, start: Start, rows_per_epoch: int) -> list[str]:
    """Return lines for the plan: where the cool-down begins, and how a resume changes the learning rate."""
    notes = []
    step = start.state.step
    if config.cools_down and step < cooldown_start(config):
        text = f"starts at step {cooldown_start(config):,}; {STABLE} is saved just before"
        if start.state.cooled_down:
            text = f"starts again at step {cooldown_start(config):,}, with weights that were cooled down before"
        notes.append(labelled("cool-down", f"{text}. To train longer: --resume stable --max_steps N"))
    if start.checkpoint:
        stored = replace(TrainConfig(**start.checkpoint["options"]), vocab_size=config.vocab_size)
        planned = with_steps(stored, rows_per_epoch, step, start.state.rows_consumed)
        before = learning_rate(planned, step)
        now = learning_rate(config, step)
        if now > 1.1 * before:
            advice = ""
            if planned.cools_down:
                advice = "; --resume stable continues from before the decay"
            notes.append(labelled("lr", f"rises from {before:.2e} to {now:.2e}{advice}"))
        elif now < 0.9 * before:
            text = f"falls from {before:.2e} to {now:.2e} at once"
            if step < config.warmup_steps and config.warmup_steps != planned.warmup_steps:
                text += f", because the warm-up now has {counted(config.warmup_steps, 'step')}; keep the old one with "
                text += f"--warmup_steps {planned.warmup_steps}"
            notes.append(labelled("lr", text))
    return notes
