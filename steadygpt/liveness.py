"""Whether a run is alive: the state that follows from a snapshot of watch.py."""

import shlex
from collections.abc import Mapping
from typing import Any, NamedTuple

from steadygpt.units import duration_text

FRESH_S = 15.0  # a run renews its heartbeat at least every 10 s
SILENT_S = 60.0  # without a heartbeat for this long, or SILENT_STEPS steps, a run hangs
SILENT_STEPS = 5
STARTING_S = 900.0  # loading data and compiling the model show no progress


class State(NamedTuple):
    """What a run does, why the monitor thinks so, and a command to continue ("" if none)."""

    name: str  # running, starting, suspended, hung, silent, killed, stopped, finished or failed
    why: str
    command: str = ""

    @property
    def is_alive(self) -> bool:
        return self.name in ("running", "starting")

    @property
    def is_well(self) -> bool:
        return self.is_alive or self.name in ("stopped", "finished")


def state_of(snapshot: Mapping[str, Any]) -> State:
    """Return the state of a run.

    A run says itself how it ended, unless it was killed. Otherwise its process decides, if it is on the machine where
    the snapshot was taken, and the age of the heartbeat.
    """
    status, host, age_s = snapshot["status"], snapshot["host"], snapshot["heartbeat_age_s"]
    age, pid = duration_text(age_s), status.get("pid")
    where = "" if snapshot["folder"] == "checkpoints" else f" --checkpoint_dir {shlex.quote(snapshot['folder'])}"
    resume = f"./resume_training.sh{where}" if snapshot["saved_age_s"] is not None else ""
    if (name := status.get("status")) != "running":
        why = status.get("reason") or {"finished": f"after {status.get('step', 0):,} steps"}.get(name, "")
        return State(name or "unknown", why, f"python generate.py latest{where}" if name == "finished" else resume)

    is_here = status.get("host", host) == host
    process = snapshot["process"] if is_here else None
    stat = process.get("stat", "Z") if process is not None else ""  # Z: dead, but its parent has not noticed
    # A process that is younger than the heartbeat is a different one with the same pid.
    is_gone = stat.startswith("Z") or (process is not None and process["age_s"] < age_s - 3)
    is_starting = status.get("doing", "" if "tokens_per_second" in status else "starting") == "starting"
    step_s = status.get("step_ms", 0) / 1000
    limit_s = STARTING_S if is_starting else max(SILENT_S, SILENT_STEPS * step_s)

    if stat.startswith("T"):
        return State("suspended", f"process {pid} is stopped by a signal; no heartbeat for {age}", f"kill -CONT {pid}")
    if is_gone and age_s > FRESH_S:  # else it runs in a container, which has process numbers of its own
        return State("killed", f"process {pid} is gone, and status.json says running; last heartbeat {age} ago", resume)
    if age_s <= limit_s:
        if is_starting:
            return State("starting", f"loading, or compiling the model, which may take minutes; heartbeat {age} ago")
        return State("running", f"{status.get('doing', 'training')}; heartbeat {age} ago")
    if process is None:
        unseen = "ps does not show" if is_here else f"it runs on {status['host']}, and {host} does not see"
        return State("silent", f"no heartbeat for {age}: hung or killed ({unseen} its process)")
    return State("hung", f"process {pid} exists, but no heartbeat for {age}", f"kill -9 {pid}")
