"""Whether a run is alive: the state that follows from a snapshot."""

import shlex
from typing import NamedTuple

from steadygpt.base.text import counted, duration_text
from steadygpt.monitor.snapshot import Snapshot

FRESH_S = 15.0  # a run renews its heartbeat at least every 10 s
SILENT_S = 60.0  # without a heartbeat for this long, or SILENT_STEPS steps, a run hangs
SILENT_STEPS = 5
COMPILING_S = 900.0  # the limit at the start and in evaluations: no heartbeat while the model is compiled


class State(NamedTuple):
    """The state of a run, the evidence for it, and a command to continue ("" if none)."""

    name: str  # running, starting, suspended, hung, silent, killed, stopped, finished or failed
    why: str
    command: str = ""

    @property
    def is_alive(self) -> bool:
        return self.name in ("running", "starting")

    @property
    def is_well(self) -> bool:
        return self.is_alive or self.name in ("stopped", "finished")


def state_of(snapshot: Snapshot) -> State:
    """Return the state of a run.

    A run says itself how it ended, unless it was killed. Otherwise its process decides, if it is on this machine, and
    the age of the heartbeat.
    """
    status, process, age_s = snapshot.status, snapshot.process, snapshot.heartbeat_age_s
    age, pid = duration_text(age_s), status.get("pid")
    folder = shlex.quote(str(snapshot.folder))
    where = "" if folder == "checkpoints" else f" --checkpoint_dir {folder}"
    resume = f"./resume_training.sh{where}" if snapshot.saved_age_s is not None else ""
    if (name := status.get("status", "unknown")) == "finished":
        return State(name, f"after {counted(status.get('step', 0), 'step')}", f"python generate.py latest{where}")
    if name != "running":
        return State(name, status.get("reason", ""), resume)

    doing = status.get("doing", "starting")
    least_s = COMPILING_S if doing in ("starting", "evaluating") else SILENT_S
    limit_s = max(least_s, SILENT_STEPS * status.get("step_ms", 0) / 1000)
    if process == "suspended":
        return State("suspended", f"process {pid} is stopped by a signal; no heartbeat for {age}", f"kill -CONT {pid}")
    if process == "gone" and age_s > FRESH_S:  # else it runs in a container, which has process numbers of its own
        return State("killed", f"process {pid} no longer exists; last heartbeat {age} ago", resume)
    if age_s <= limit_s:
        if doing == "starting":
            return State(
                "starting", f"loading data or compiling the model, which may take minutes; heartbeat {age} ago"
            )
        return State("running", f"{doing}; heartbeat {age} ago")
    if process == "elsewhere":
        return State(
            "silent", f"no heartbeat for {age}: hung or killed on {status['host']}, which this machine cannot see"
        )
    return State("hung", f"process {pid} exists, but sent no heartbeat for {age}", f"kill -9 {pid}")
