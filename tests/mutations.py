"""Break the product in one place at a time, and report which test notices: what the tests hold.

    python -m tests.mutations                      # all, some hours on two cores
    python -m tests.mutations --only durable       # those whose file or text contains this
    python -m tests.mutations --to mutations.json  # those that a file of results lacks; adds them to it
    python -m tests.mutations --most 5             # up to five tests or more that notice each: how many may go

Each mutation replaces a text that occurs once in a file of a copy of the project, and runs the tests that are most
likely to notice, then all others, up to the first failure or --most of them. A mutation that no fast test notices has
escaped. Some cannot be noticed on a CPU, and are not in the list.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

REPO = Path(__file__).resolve().parent.parent
TIMEOUT_S = 600  # of the tests of one mutation; a mutation may make a process wait forever


class Mutation(NamedTuple):
    """A text of a file, what replaces it, and the tests that are most likely to notice."""

    file: str
    old: str
    new: str
    tests: str  # names of files in tests/, without .py


MUTATIONS = [Mutation(*row) for row in (
    # The step: what is computed, and by which rank.
    ("train.py", "micro_batch = run.ranks.rank * grad_accum_steps + micro_step",
     "micro_batch = micro_step", "faults/test_equal"),
    ("train.py", "(config.seed * 1_000_003 + step) * 65_537", "(config.seed * 1_000_003) * 65_537", "test_train"),
    ("train.py", "config.grad_clip or math.inf", "math.inf", "test_train test_optim"),
    ("evaluation.py", "losses[end * config.context_length :] = 0", "pass", "test_train test_bits_per_byte"),
    ("evaluation.py", '["loss"].where(sizes.flatten() > 0, 0).sum()', '["loss"].sum()', "test_bits_per_byte"),
    ("optim.py", 'group["lr"] = lr * group["lr_ratio"]', 'group["lr"] = lr', "test_optim test_train"),
    ("steadygpt/machine/ranks.py", "results.append(whole[:, at : at + len(part)].reshape(-1).mean())",
     "results.append(whole[:1, at : at + len(part)].reshape(-1).mean())", "faults/test_equal"),
    ("evaluation.py", "manual_seed(config.seed + step)", "manual_seed(config.seed)", "test_train"),
    # What the ranks ask each other, which rides with the numbers of a step.
    ("steadygpt/machine/ranks.py", "whole[:, at:].amax(0)", "whole[0, at:]", "machine/test_ranks faults/test_stop"),
    ("train.py", "numbers, run.requests.agreed = run.ranks", "numbers, _ = run.ranks", "faults/test_stop test_train"),
    ("steadygpt/machine/ranks.py", " or self.agreed.step_s > self.LONG_S:", ":",
     "machine/test_ranks faults/test_stop"),
    ("steadygpt/run/saving.py", "run.requests.save = False", "pass", "machine/test_ranks checkpoint/test_writer"),
    # The loss.
    ("steadygpt/machine/loss.py", "gradients.mT @ (x * factors).to(x.dtype)", "gradients.mT @ x", "machine/test_loss"),
    ("steadygpt/machine/loss.py", "return 1024.0 if", "return 1.0 if", "machine/test_loss"),
    ("steadygpt/machine/loss.py", "x = x.mul_(slope)", "pass", "machine/test_loss"),
    ("steadygpt/machine/loss_kernel.py", "tl.where(columns < vocab_size, gradient, 0.0)",
     "gradient", "machine/test_loss"),
    ("steadygpt/machine/loss_kernel.py", 'tl.where(columns < vocab_size, x, -float("inf"))', "x", "machine/test_loss"),
    ("steadygpt/machine/loss_kernel.py", "totals = totals * _exp(largest - larger) + _exp(x - larger)",
     "totals += _exp(x - larger)", "machine/test_loss"),
    ("steadygpt/machine/loss_kernel.py", "slope = 1 - tanh * tanh", "slope = 1.0", "machine/test_loss"),
    ("steadygpt/machine/loss_kernel.py", 'tl.where(is_in_vocabulary, loss, float("inf"))', "loss", "machine/test_loss"),
    # Once escaped, or noticed by one test alone.
    ("optim.py", 'local.mul_(1 - group["lr"] * group["weight_decay"])', "pass", "test_optim"),
    ("optim.py", 'gradient.lerp(average, group["momentum"])', "average", "test_optim"),
    ("optim.py", "math.sqrt(max(1, rows / parameter.size(1)))", "1.0", "test_optim"),
    ("optim.py", "if wrong:", "if False:", "test_optim"),
    ("optim.py", "tensor.dtype != torch.float32", "False", "test_optim"),
    ("steadygpt/base/durable.py", "with temporary.open(\"rb\") as file:\n                fsync(file.fileno())", "pass",
     "base/test_power_cuts"),
    ("convert_hf.py", "fsync(written.fileno())", "pass", "base/test_power_cuts"),
    ("steadygpt/mirror/store.py", "fsync(target.fileno())", "pass", "base/test_power_cuts"),
    ("dataloader.py", "block[0] != number", "block[0] < number", "test_dataloader"),
    ("train.py", "last=micro_step == grad_accum_steps - 1", "last=True", "machine/test_ranks"),
    ("steadygpt/machine/parallel.py", "set_sync(last)", "set_sync(True)", "machine/test_ranks"),
    ("train.py", "mean.sum() / grad_accum_steps", "mean.sum()", "test_plain_loop"),
    ("train.py", "mean.sum()", "mean[0]", "test_train"),
    ("steadygpt/run/step.py", "if used_twice:", "if False:", "test_train"),
    ("steadygpt/machine/device.py", "    model.eval()\n    try", "    try", "test_plain_loop"),
    # The order of the data.
    ("dataloader.py", "step[self.rank * rows_per_rank :", "step[self.rank :", "test_dataloader"),
    ("dataloader.py", 'ends, positions, side="right")', 'ends, positions, side="left")', "test_dataloader"),
    ("dataloader.py", "key_of(seed, epoch, shard)", "key_of(seed, epoch)", "test_dataloader"),
    ("dataloader.py", "positions * self.stream.rows_per_epoch // self.count", "positions", "test_dataloader"),
    ("dataloader.py", "shard.num_tokens - 1 for", "shard.num_tokens for", "test_dataloader"),
    ("dataloader.py", "self.leftover[shard] + np.uint64(1)", "self.leftover[shard] + np.uint64(2)", "test_dataloader"),
    ("dataloader.py", "key_of(seed, epoch, shard, 1)", "key_of(seed, shard, 1)", "test_dataloader"),
    ("dataloader.py", "if longest.num_tokens <= T:", "if longest.num_tokens < T:", "test_dataloader"),
    ("steadygpt/data/order.py", "ROUNDS = 10", "ROUNDS = 6", "test_dataloader"),
    ("steadygpt/data/order.py", "x ^ is_swapped", "x", "test_dataloader"),
    ("steadygpt/data/order.py", "key_of(seed, self.number, block, BLOCK_ROWS)",
     "key_of(seed, block, BLOCK_ROWS)", "test_mixture"),
    ("steadygpt/data/order.py", "[:within].tolist()", "[: within + 1].tolist()", "test_mixture"),
    ("steadygpt/data/order.py", "shares[source] - exact[source]", "exact[source] - shares[source]", "test_mixture"),
    # The optimizer and the learning rate.
    ("optim.py", ', "weight_decay": 0.0}', '}', "test_optim"),
    ("optim.py", "ITERATIONS = 5", "ITERATIONS = 4", "test_optim"),
    ("optim.py", "x.size(1)  # (N, columns)", "x.size(2)  # (N, columns)", "test_optim"),
    ("optim.py", "config.max_lr * (step + 1) / config.warmup_steps",
     "config.max_lr * step / config.warmup_steps", "run/test_schedule"),
    ("optim.py", "0.5 * (1 + math.cos", "0.5 * (1 - math.cos", "run/test_schedule"),
    ("steadygpt/run/schedule.py", "config.cools_down and step == cooldown_start(config) and",
     "config.cools_down and step == cooldown_start(config) + 1 and", "run/test_schedule test_resume"),
    ("steadygpt/run/schedule.py", " and not state.cooled_down", "", "test_resume"),
    ("steadygpt/run/schedule.py", "step % freq == 0", "step % freq == 1", "run/test_schedule test_train"),
    ("steadygpt/base/durable.py", "    except OSError:\n        return True\n    try", "    try", "faults/test_disk"),
    ("steadygpt/start/folder.py", "None if start.is_fork else start.path, decided != stored)",
     "None if start.is_fork else start.path, False)", "faults/test_launch"),
    ("steadygpt/start/build.py", "parallel.settle_buckets(forward, device, shape, autocast(device, config.precision))",
     "pass", "faults/test_equal"),
    # Bad steps.
    ("steadygpt/run/step.py", "finite and not (spike and config.skip_spikes)", "finite", "run/test_judge"),
    ("steadygpt/run/step.py", "recent_losses[-SPIKE_WINDOW:]\n    if", "recent_losses\n    if", "run/test_judge"),
    ("steadygpt/run/step.py", "state.bad_steps + 1 if result.bad else 0",
     "state.bad_steps + result.bad", "run/test_record faults/test_divergence"),
    ("steadygpt/run/step.py", "state.rows_consumed -= bad_steps * run.config.rows_per_step",
     "pass", "run/test_record faults/test_divergence"),
    # Saves.
    ("steadygpt/run/saving.py", "run.log.flush()  # a checkpoint",
     "pass  # a checkpoint", "checkpoint/test_writer"),
    ("steadygpt/run/saving.py", 'content["metrics_bytes"] = run.log.size_of(METRICS)', "pass", "run/test_repeats"),
    ("steadygpt/checkpoint/writer.py", "fsync_folder(self.folder)  # only now",
     "pass  # only now", "checkpoint/test_writer faults/test_kill"),
    ("steadygpt/checkpoint/writer.py", "max(time.time(), newest_s + 0.001)", "time.time()", "checkpoint/test_writer"),
    ("steadygpt/checkpoint/writer.py", "temporary.unlink(missing_ok=True)  # a file",
     "pass  # a file", "checkpoint/test_writer"),
    ("steadygpt/checkpoint/writer.py", "or val_loss < best.val_loss", "or val_loss <= best.val_loss",
     "checkpoint/test_writer"),
    ("steadygpt/checkpoint/writer.py", "            self.best = best  # only now", "            pass  # only now",
     "checkpoint/test_writer faults/test_belongings"),
    ("steadygpt/checkpoint/writer.py", "        try:\n            files.check_numbers(content)",
     "        self.best = self.best_in_flight or self.best\n        try:\n            files.check_numbers(content)",
     "faults/test_belongings"),
    ("steadygpt/checkpoint/writer.py", "best.validated_on != validated_on or", "", "checkpoint/test_writer"),
    ("steadygpt/checkpoint/writer.py", "self.failed >= MAX_FAILED and", "self.failed > 0 and",
     "checkpoint/test_writer"),
    ("steadygpt/checkpoint/writer.py", "pause_s / PAUSE_SHARE", "pause_s * PAUSE_SHARE", "checkpoint/test_writer"),
    ("steadygpt/checkpoint/writer.py", "if not leads_to_lock(self.folder, self.lock):", "if False:",
     "faults/test_belongings"),
    ("steadygpt/base/durable.py", "            if durable:\n                fsync(file.fileno())",
     "            if not durable:\n                fsync(file.fileno())", "base/test_durable faults/test_kill"),
    ("steadygpt/base/durable.py", "    if durable:\n        fsync_folder(path.parent)",
     "    if not durable:\n        fsync_folder(path.parent)", "base/test_durable faults/test_kill"),
    ("steadygpt/base/durable.py", "temporary.unlink(missing_ok=True)  # left by a killed process",
     "pass  # left", "base/test_durable"),
    ("steadygpt/base/durable.py", "fcntl.LOCK_EX | fcntl.LOCK_NB",
     "fcntl.LOCK_SH | fcntl.LOCK_NB", "base/test_durable test_refused"),
    ("steadygpt/run/repeats.py", "or relative > bound", "or False", "run/test_repeats"),
    ("steadygpt/data/shards.py", "if now.st_ino == mapped.st_ino and (", "if False and (", "faults/test_belongings"),
    ("steadygpt/run/step.py", "row_s = statistics.median(meter.row_seconds)",
     "row_s = statistics.fmean(meter.row_seconds)", "run/test_record"),
    ("steadygpt/checkpoint/files.py", "archive.testzip()",
     "None", "checkpoint/test_files faults/test_damage"),
    ("steadygpt/checkpoint/files.py", "mmap=True, weights_only=True",
     "mmap=True, weights_only=False", "checkpoint/test_files"),
    ("steadygpt/checkpoint/files.py", "newest_first[count:] if count",
     "newest_first[count + 1 :] if count", "checkpoint/test_files checkpoint/test_writer"),
    ("steadygpt/checkpoint/files.py", "if not (low.isfinite() and high.isfinite()):",
     "if not low.isfinite():", "checkpoint/test_files"),
    # What a start continues, the mirror, logs.
    ("steadygpt/mirror/restore.py", "if entry.saved_at <= newest_s:",
     "if entry.saved_at < newest_s:", "mirror/test_mirror"),
    ("steadygpt/log/metrics.py", '_id_in(original) == record["id"]:', "original.exists():",
     "checkpoint/test_identity"),
    ("steadygpt/log/metrics.py", 'os.path.realpath(folder) != record["folder"] and', "",
     "checkpoint/test_identity"),
    ("steadygpt/monitor/snapshot.py", "if not snapshot.owner and is_here:", "if False:", "monitor/test_monitor"),
    ("steadygpt/mirror/uploads.py", "if file.recency > complete.get(",
     "if file.recency >= complete.get(", "mirror/test_mirror"),
    ("steadygpt/log/metrics.py", '< launch["first_step"]', '<= launch["first_step"]', "log/test_metrics"),
    ("steadygpt/log/metrics.py", "fsync(self.file.fileno())", "pass", "log/test_runlog checkpoint/test_writer"),
    # The model, samples, scores.
    ("model.py", "second * cos + first * sin", "second * cos - first * sin", "test_model convert/test_families"),
    ("model.py", "std /= math.sqrt(2 * ", "std /= math.sqrt(", "test_model"),
    ("model.py", "return mixed + self.mlp(self.ln_2(x))", "pass", "convert/test_families"),
    ("model.py", "y = y * self.c_gate(x).sigmoid().unsqueeze(-1)", "pass", "convert/test_families"),
    ("model.py", "last.copy_(x[:, x.size(1) - count :])", "pass", "test_contract test_generate"),
    ("model.py", "positions[:, None, :] == back)", "positions[:, None, :] == back - 1)", "test_contract"),
    ("model.py", "bound = CONV_WIDTH**-0.5", "bound = 1.0", "test_model"),
    ("model.py", "shape.layer_pattern.count(ATTENTION)", "shape.num_layers", "test_contract"),
    ("steadygpt/start/memory.py", "blocks += block * layers", "blocks += block * shape.num_layers",
     "start/test_memory"),
    ("steadygpt/convert/families.py", 'fields["intermediate_size"] = math.ceil', "math.ceil", "convert/test_families"),
    ("model.py", "weight[self.config.vocab_size :] = 0", "pass", "test_model"),
    ("steadygpt/inference/sampling.py", "min(top_k, logits.size(-1))).values[:, -1:]",
     "min(top_k, logits.size(-1))).values[:, :1]", "test_generate"),
    ("steadygpt/inference/sampling.py", "fits = idx.size(1) <= context", "fits = True", "test_generate"),
    ("steadygpt/inference/scoring.py", "per_token = sums / np", "per_token = sums * np", "test_hellaswag_eval"),
    ("steadygpt/inference/scoring.py", "ids[::-1] for ids in answers", "ids for ids in answers", "test_hellaswag_eval"),
    ("steadygpt/data/tasks.py", "n + (n >= number)", "n", "data/test_tasks"),
    # Preparing.
    ("steadygpt/prepare/encode.py", "clean = repair(text)", "clean = text", "test_prepare_dataset"),
    ("steadygpt/network/stores.py", "if len(block) != size:", "if False:", "network/test_hub"),
    ("steadygpt/prepare/writer.py", "if not is_written:", "if False:", "test_prepare_refusals"),
    ("steadygpt/prepare/manifest.py", "self.next = Place(last.file, last.end)", "pass", "test_prepare_resume"),
    ("steadygpt/data/shards.py", "first_of.setdefault((stat.st_dev, stat.st_ino), file)",
     "first_of.setdefault((0, len(first_of)), file)", "test_dataloader"),
    ("steadygpt/data/tokenizer_json.py", "if merged != sorted(merged):", "if False:", "data/test_tokenizer_json"),
    ("steadygpt/data/tokenizer_json.py", "!= token[\"id\"]:", "is None:", "data/test_tokenizer_json"),
    ("steadygpt/data/tokenizer_json.py", "ignore_merges = False", "ignore_merges = True", "data/test_tokenizer_json"),
    ("steadygpt/data/tokenizer_json.py", "merges_agree = False", "pass", "data/test_tokenizer_json"),
    ("steadygpt/data/encoders.py", "if self.is_nfc and not", "if False and not", "data/test_tokenizer_json"),
    ("steadygpt/prepare/documents.py", "_BEFORE_WORD)", "b'')", "data/test_tokenizer_json"),
    ("steadygpt/base/retry.py", "status in (408, 425, 429)", "status in (408, 425)", "base/test_retry"),
    ("steadygpt/data/shards.py", "else ids >= vocab_size",
     "else ids > vocab_size", "test_prepare_refusals test_refused"),
    # In all rooms, invented by someone who had not read the tests.
    ("train.py", '        status = "failed"\n        reason = f"{reason}; the last save failed"',
     '        reason = f"{reason}; the last save failed"', "faults/test_disk"),
    ("evaluation.py", "first, *others = sets", "*others, first = sets", "test_mixture"),
    ("model.py", "            logits = logits[:, : self.config.vocab_size]\n            at_targets",
     "            at_targets", "test_model"),
    ("steadygpt/inference/scoring.py", "surplus = max(0, max(map(len, whole)) - limit)",
     "surplus = max(0, min(map(len, whole)) - limit)", "test_hellaswag_eval"),
    ("convert_hf.py", "if not weight.isfinite().all():",
     "if weight.isnan().any():", "convert/test_brought"),
    ("steadygpt/checkpoint/writer.py", "(0.0, step))[1] != step and", "(0.0, step))[1] > step and",
     "checkpoint/test_writer"),
    ("steadygpt/prepare/documents.py", "                first = max(0, first - batch.num_rows)",
     "                first = 0", "test_prepare_stores prepare/test_documents"),
    ("steadygpt/convert/families.py", '"mlp_bias": False, "rope_scaling": None, "rope_type"',
     '"mlp_bias": False, "rope_type"', "convert/test_families"),
    ("steadygpt/machine/ranks.py", "time.monotonic() - process_age_s() + 3600 * max_hours",
     "time.monotonic() + process_age_s() + 3600 * max_hours", "machine/test_ranks"),
    ("prepare_dataset.py", "begun.versions != source.versions", "False", "test_prepare_stores"),
    # Units of time.
    ("steadygpt/machine/ranks.py", "timedelta(minutes=timeout_minutes)", "timedelta(seconds=timeout_minutes)",
     "test_spans"),
    ("steadygpt/machine/ranks.py", "+ 3600 * max_hours", "+ 60 * max_hours", "test_spans"),
    ("steadygpt/checkpoint/writer.py", "self.interval_s = 60 * config", "self.interval_s = config", "test_spans"),
    ("steadygpt/checkpoint/writer.py", "max(60 * self.config", "max(self.config", "checkpoint/test_writer"),
    ("steadygpt/checkpoint/writer.py", "longest_s = MAX_FAILED *", "longest_s =", "test_spans"),
    ("steadygpt/start/plan.py", "interval_s = 60 * config", "interval_s = config", "start/test_plan"),
    ("steadygpt/run/step.py", "return seconds / 3600 *", "return seconds / 60 *", "test_spans run/test_record"),
    ("steadygpt/mirror/uploads.py", "TIMED_S = 600.0", "TIMED_S = 10.0", "test_spans"),
    ("steadygpt/mirror/uploads.py", "GIVE_UP_S = 600.0", "GIVE_UP_S = 10.0", "test_spans"),
    ("steadygpt/log/runlog.py", "HEARTBEAT_S = 10.0", "HEARTBEAT_S = 600.0", "test_spans log/test_runlog"),
    ("steadygpt/log/alerts.py", "REPEAT_S = 600.0", "REPEAT_S = 10.0", "test_spans"),
    ("steadygpt/base/retry.py", "PATIENCE_S = 25 * 60.0", "PATIENCE_S = 25.0", "test_spans network/test_hub"),
    ("steadygpt/monitor/snapshot.py", "\nSILENT_S = 60.0", "\nSILENT_S = 3600.0", "test_spans monitor/test_monitor"),
    ("steadygpt/monitor/snapshot.py", 'get("step_ms", 0) / 1000', 'get("step_ms", 0)', "test_spans"),
    # Wrong rank, stale values after a resume, dropped keys, swallowed exceptions, off by one, never -> free.
    ("steadygpt/run/step.py", "(peak * run.ranks.world_size)", "peak", "run/test_record"),
    ("steadygpt/run/step.py", "* run.ranks.world_size * run.config.gpu", "* run.config.gpu", "run/test_record"),
    ("steadygpt/start/build.py", "state.bad_steps = 0  # it counts", "pass  # it counts", "faults/test_divergence"),
    ("steadygpt/start/build.py", "scaler.load_state_dict(scaler.state_dict() | checkpoint[\"scaler\"])", "pass",
     "faults/test_divergence faults/test_equal"),
    ("steadygpt/run/saving.py", '"scaler": run.scaler.state_dict(),', '"scaler": {},', "faults/test_divergence"),
    ("steadygpt/run/saving.py", '"elapsed_s": run.state.total_s(),', "", "run/test_summary test_resume"),
    ("steadygpt/run/saving.py", "    wait_for_save(run)  # the copy reuses", "    pass  # the copy reuses",
     "checkpoint/test_writer"),
    ("steadygpt/machine/parallel.py", "            reshard()", "            pass", "machine/test_ranks"),
    ("steadygpt/checkpoint/files.py", "        if rows != expected:", "        if rows < expected:",
     "checkpoint/test_files"),
    ("steadygpt/checkpoint/writer.py", "            self.failed += 1\n", "            self.failed += 0\n",
     "checkpoint/test_writer faults/test_disk"),
    ("steadygpt/run/schedule.py", "epoch > int(epochs(rows - config.rows_per_step, rows_per_epoch)):",
     "rows % max(1, rows_per_epoch) == 0:", "run/test_schedule"),
    ("steadygpt/start/find.py", 'if rule == "never":', 'if rule == "none":', "start/test_find"),
    ("steadygpt/start/find.py", 'if rule == "ask" and not', 'if rule == "ask" and', "start/test_find"),
    ("steadygpt/config.py", 'at_most=2**63 - 1, on_resume="never")', "at_most=2**63 - 1)", "test_docs"),
    ("train.py", "if run.requests.asked and not run.meter.steps:", "if run.requests.asked:", "faults/test_stop"),
    ("train.py", "is_last = run.state.step >= run", "is_last = run.state.step > run", "test_train"),
    ("convert_hf.py", "shutil.copymode(temporary", "print(temporary", "test_convert_hf"),
    ("scripts/multinode.sh", "trap '' USR1", ":", "test_nodes"),
    ("scripts/multinode.sh", 'exec "${command[@]}"', '"${command[@]}" || true', "test_nodes"),
    ("scripts/setup.sh", "(trap '' INT && exec", "(exec", "test_other_trainers"),
    ("prepare_dataset.py", "    check_known(tokenizer)", "    pass", "test_prepare_refusals"),
    ("steadygpt/run/summary.py", "if processes > 1 and run.ranks.is_one_machine", "if False", "run/test_summary"),
    ("steadygpt/run/step.py", "recent_losses[-SPIKE_WINDOW:]\n    if", "recent_losses[:SPIKE_WINDOW]\n    if",
     "run/test_judge"),
    ("dataloader.py", "key_of(seed, epoch, shard)", "key_of(seed, 0, shard)", "test_dataloader"),
    # Invented after the last change of the product.
    ("steadygpt/run/summary.py", "run_flags(config.checkpoint_dir, config.mirror)", "run_flags(config.checkpoint_dir)",
     "run/test_summary"),
    ("steadygpt/monitor/snapshot.py", ', status.get("mirror", ""))', ")", "monitor/test_monitor"),
    ("steadygpt/prepare/documents.py", 'if line.startswith("{") and line.endswith("}") and not', "if False and not",
     "test_prepare_dataset"),
    ("steadygpt/prepare/encode.py", '"byte" if isinstance(block.data, bytes) else "row"', '"row"',
     "test_prepare_dataset"),
    ("steadygpt/data/shards.py", "if data_dir.suffix in TEXTS or any(", "if False and any(", "test_refused"),
    ("steadygpt/config.py", "fitting = math.gcd(self.total_batch_size // self.context_length, world_size)",
     "fitting = world_size", "test_config"),
    ("steadygpt/data/tokenizer.py", "difflib.get_close_matches(name.lower(), names, n=1)", "[]",
     "test_refused test_prepare_refusals"),
    ("train.py", "        save_if_due(run, True)\n    if not is_saved", "        pass\n    if not is_saved",
     "faults/test_stop"),
    ("scripts/start_tensorboard.sh", '-n "$(ls "$folder"', '-n "$(ls -a "$folder"', "test_other_trainers"),
    ("steadygpt/prepare/validation.py", "self.largest < lacking", "self.largest < lacking - size",
     "prepare/test_validation"),
    ("steadygpt/prepare/validation.py", "random.Random(self.pieces)", "random.Random()", "test_prepare_resume"),
    ("steadygpt/prepare/documents.py", "cut = match.start()", "pass", "prepare/test_losses"),
    ("steadygpt/prepare/encode.py", "encoded.changed_bytes += changed_bytes(sample, tokenizer)", "pass",
     "prepare/test_losses"),
    ("steadygpt/prepare/manifest.py", "is_same = value == before", "is_same = value in (None, before)",
     "prepare/test_losses"),
    ("convert_hf.py", '"" if importlib.util.find_spec("transformers") else', '"" if True else', "test_convert_hf"),
    ("steadygpt/run/saving.py", "if is_due or names:", "if is_due:", "checkpoint/test_writer"),
    ("steadygpt/mirror/uploads.py", "            if self.is_last:", "            if False:", "mirror/test_mirror"),
    # What users read.
    ("steadygpt/checkpoint/files.py", "already holds checkpoints; {advice}",
     "holds checkpoints", "test_refused test_train"),
    ("steadygpt/run/step.py", 'flags = f"--allow_changes --max_lr', 'flags = f"--max_lr', "run/test_judge"),
    # The best model, errors that ranks share, sizes and times of a plan.
    ("steadygpt/run/saving.py", "state.validated_on != run.validated_on", "False",
     "checkpoint/test_writer test_resume"),
    ("steadygpt/run/saving.py", "if is_best(run):", "if False:", "checkpoint/test_writer"),
    ("steadygpt/run/saving.py", "if is_resumed_here or state.scores:", "if is_resumed_here:",
     "machine/test_ranks"),
    ("steadygpt/machine/ranks.py", "problems[0]", "problem", "test_nodes"),
    ("steadygpt/start/find.py", "if getattr(command, name) != getattr(of_main, name):", "if False:", "test_nodes"),
    ("steadygpt/start/plan.py", "peak /= 2  # as TF32", "pass", "start/test_plan"),
    ("model.py", "self.num_kv_heads or self.num_heads", "self.num_heads", "convert/test_families test_optim"),
    ("steadygpt/checkpoint/files.py", "shapes += state_shapes(model.config, optimizer).values()", "pass",
     "start/test_plan"),
)]  # fmt: skip


def check_texts() -> None:
    """End now, and not after hours, if a mutation no longer fits the code."""
    for mutation in MUTATIONS:
        count = (REPO / mutation.file).read_text().count(mutation.old)
        assert count == 1, f"{mutation.file}: {count} times {mutation.old!r}"
        assert all((REPO / f"tests/{name}.py").exists() for name in mutation.tests.split()), mutation


def name_of(mutation: Mutation) -> str:
    return f"{mutation.file}: {mutation.old} -> {mutation.new}"


def run(mutation: Mutation, folder: Path, only_likely: bool, most: int) -> tuple[list[str], float]:
    """Return the tests that notice a mutation of the copy in a folder, `most` or some more of them, and the seconds."""
    path, start_s = folder / mutation.file, time.monotonic()
    text = path.read_text()
    path.write_text(text.replace(mutation.old, mutation.new))
    likely = [f"tests/{name}.py" for name in mutation.tests.split()]
    found: list[str] = []
    try:
        for tests in (likely, ["tests"])[: 1 if only_likely else 2]:
            command = [sys.executable, "-m", "pytest", f"--maxfail={most}", "-q", "-p", "no:cacheprovider", *tests]
            command += ["-n", "2", "--dist", "worksteal"] * (tests == ["tests"])
            try:
                done = subprocess.run(
                    command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, start_new_session=True,
                    env=os.environ | {"OMP_NUM_THREADS": "1"},
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                return [*found, "a test that waits forever"], time.monotonic() - start_s
            failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
            if done.returncode and not failed:
                failed = [f"exit status {done.returncode}"]
            found += [test for test in failed if test not in found]
            if len(found) >= most:
                break
        return found, time.monotonic() - start_s
    finally:
        path.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run the mutations whose file or text contains this")
    parser.add_argument("--likely", action="store_true", help="run only the tests most likely to notice")
    parser.add_argument("--most", type=int, default=1, help="tests after which a mutation is left")
    parser.add_argument("--jobs", type=int, default=2, help="mutations at the same time")
    parser.add_argument("--to", help="a JSON file of results")
    args = parser.parse_args()
    check_texts()
    results = json.loads(Path(args.to).read_text()) if args.to and Path(args.to).exists() else {}
    chosen = [m for m in MUTATIONS if args.only in f"{m.file}: {m.old}" and name_of(m) not in results]
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(args.jobs) as pool:
        folders = []
        for number in range(args.jobs):
            folders.append(Path(temporary, str(number)))
            subprocess.run(["git", "clone", "-q", REPO, folders[-1]], check=True)
        free = list(folders)

        def judge(mutation: Mutation) -> tuple[list[str], float]:
            folder = free.pop()
            try:
                return run(mutation, folder, args.likely, args.most)
            finally:
                free.append(folder)

        judged = {pool.submit(judge, mutation): mutation for mutation in chosen}
        for number, future in enumerate(as_completed(judged), start=1):
            mutation, (tests, seconds) = judged[future], future.result()
            results[name_of(mutation)] = tests
            noticed = f"{len(tests)}, first {tests[0]}" if tests else "ESCAPED"
            print(f"{number} of {len(chosen)}, {seconds:.0f} s: {mutation.file}: {mutation.old[:60]!r}: {noticed}",
                  flush=True)  # fmt: skip
            if args.to:
                Path(args.to).write_text(json.dumps(results, indent=1))
    escaped = [name for name, tests in results.items() if not tests]
    print(f"{len(results) - len(escaped)} of {len(results)} mutations are noticed; escaped:", *escaped, sep="\n  ")


if __name__ == "__main__":
    main()
