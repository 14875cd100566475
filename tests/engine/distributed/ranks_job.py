"""Runs a list of conditions in several processes: this file is what each of them executes."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def launch(
    name: str,
    world: int = 2,
    seconds: float = 300.0,
    extra: dict[str, str] | None = None,
    during: Callable[[list[subprocess.Popen[bytes]]], None] | None = None,
) -> list[dict[str, Any]]:
    """Run ``JOBS[name]`` of ``ranks_jobs`` (or of ``extra["JOB_MODULE"]``) in so many processes; return what each of them found.

    ``during`` is called with the processes while they run. Nobody is left behind.
    """
    import torch

    with tempfile.TemporaryDirectory() as folder:
        paths = [str(HERE), str(HERE.parent.parent), *sys.path]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in paths if p), **(extra or {})}
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(world):
                command = [sys.executable, str(HERE / "ranks_job.py"), name, str(rank), str(world), folder]
                with open(Path(folder) / f"log{rank}", "w") as log:
                    processes.append(
                        subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
                    )
            if during is not None:
                during(processes)
            until = time.monotonic() + seconds
            codes = [p.wait(max(0.1, until - time.monotonic())) for p in processes]
        except subprocess.TimeoutExpired:
            logs = "\n".join((Path(folder) / f"log{r}").read_text()[-3000:] for r in range(world))
            raise AssertionError(f"{name} did not end in {seconds} s:\n{logs}") from None
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()
            orphans = [end_session(process.pid) for process in processes]
        found = []
        for rank, code in enumerate(codes):
            path = Path(folder) / f"found{rank}.pt"
            told = torch.load(path, weights_only=False) if path.exists() else {}
            log_text = (Path(folder) / f"log{rank}").read_text()
            found.append({"code": code, "log": log_text, "orphans": orphans[rank], **told})
        return found


def end_session(leader: int, seconds: float = 5.0) -> bool:
    """Wait for what a process left behind, and end it; whether there was something to end."""
    until = time.monotonic() + seconds
    try:
        while time.monotonic() < until:
            os.killpg(leader, 0)
            time.sleep(0.05)
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def main(name: str, rank: int, world: int, folder: str) -> None:
    """Be one process of a job."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    timeout = timedelta(seconds=float(os.environ.get("JOB_TIMEOUT", "60")))
    dist.init_process_group("gloo", init_method=f"file://{folder}/init", rank=rank, world_size=world, timeout=timeout)
    job = importlib.import_module(os.environ.get("JOB_MODULE", "ranks_jobs")).JOBS[name]
    found: dict[str, Any] = {}
    only = os.environ.get("JOB_ONLY", "")
    for condition, run in ((c, r) for c, r in job.items() if only in c):
        began = time.monotonic()
        try:
            found[condition] = run(rank, world)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            found[condition] = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
            print(found[condition]["trace"], flush=True)
        print(f"{condition}: {time.monotonic() - began:.1f} s", flush=True)
        gc.collect()
        if os.environ.get("JOB_STOPS") and "error" in found[condition]:
            break
    torch.save(found, f"{folder}/found{rank}.tmp")
    os.rename(f"{folder}/found{rank}.tmp", f"{folder}/found{rank}.pt")
    gc.collect()
    if not os.environ.get("JOB_STOPS"):
        dist.barrier()
        dist.destroy_process_group()
        # Not through the interpreter's end: DDP keeps gloo's threads beyond its group.
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
