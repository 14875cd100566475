"""Trainings in several processes, as a launcher would start them; forked from a server that has torch loaded already."""

from __future__ import annotations

import hashlib
import json
import logging
import multiprocessing
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pandas  # noqa: F401 - loaded once, by the server
import torch
import torch._dynamo

from inrun.errors import InrunError
from inrun.training import loop
from inrun.training.config import make_config
from inrun.training.loop import Status
from inrun.training.session import train

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["several"])


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def keep_model() -> list[Any]:
    """Return a list that the model of this process's training will be put in."""
    kept: list[Any] = []
    spread = loop.spread

    def keeping(*args: Any) -> Any:
        kept.append(spread(*args))
        return kept[-1]

    loop.spread = keeping
    return kept


def digest(model: Any) -> str:
    """Return a digest of the weights as they are in this process, bit for bit."""
    found = hashlib.sha256()
    for p in model.parameters():
        found.update(getattr(p, "_local_tensor", p).detach().numpy().tobytes())
    return found.hexdigest()


def run_rank(rank: int, world: int, port: int, config: dict[str, Any], options: dict[str, Any], out: str) -> None:
    """Be one rank: train, and leave how it ended. ``stop_at`` {rank: step}; ``die_at``: [rank, step]; ``pause``: s per step."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    told = Path(out) / f"told-{rank}"
    logging.basicConfig(filename=str(Path(out) / f"log-{rank}"), force=True)
    last = Status(0, 0)

    def tell(status: Status) -> None:
        last.step = status.step
        told.write_text(str(status.step))
        time.sleep(options.get("pause", 0.0))
        if options.get("die_at") == [rank, status.step]:
            os.kill(os.getpid(), signal.SIGKILL)
        if options.get("hang_at") == [rank, status.step]:
            time.sleep(3600)

    stop_at = options.get("stop_at", {}).get(str(rank))
    found: dict[str, Any] = {}
    models = keep_model()
    try:
        result = train(
            make_config(config),
            resume=options.get("resume", False),
            tell=tell,
            stop=lambda: stop_at is not None and last.step >= stop_at,
        )
        found = {"step": result.status.step, "finished": result.finished, "validation": result.status.validation}
        found["weights"] = digest(models[-1])
    except InrunError as error:
        found = {"error": f"{type(error).__name__}: {error}"}
    aside = Path(out) / f"out-{rank}.tmp"
    aside.write_text(json.dumps(found))
    os.replace(aside, Path(out) / f"out-{rank}.json")
    if "error" in found:
        os._exit(1)


class Ranks:
    """The processes of one training; leaving ends them all."""

    def __init__(self, folder: Path, world: int, config: dict[str, Any], **options: Any) -> None:
        self.out = folder / f"ranks-{time.monotonic_ns()}"
        self.out.mkdir()
        options = json.loads(json.dumps(options))
        more = (world, free_port(), config, options, str(self.out))
        self.children = [context.Process(target=run_rank, args=(rank, *more), daemon=True) for rank in range(world)]

    def __enter__(self) -> Ranks:
        for child in self.children:
            child.start()
        return self

    def __exit__(self, *_: object) -> None:
        for child in self.children:
            child.kill()
            child.join()

    def finish(self, seconds: float = 240.0) -> list[dict[str, Any]]:
        """Wait for all; return how each ended ({} if it was killed)."""
        until = time.monotonic() + seconds
        for child in self.children:
            child.join(max(0.1, until - time.monotonic()))
        running = [rank for rank, child in enumerate(self.children) if child.is_alive()]
        assert not running, f"ranks {running} hang"
        files = [self.out / f"out-{rank}.json" for rank in range(len(self.children))]
        return [json.loads(file.read_text()) if file.exists() else {} for file in files]

    def steps(self) -> int:
        """Return how many steps rank 0 has told of."""
        file = self.out / "told-0"
        text = file.read_text() if file.exists() else ""
        return int(text or 0)


def train_in(folder: Path, world: int, config: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    """Train in so many processes, and wait for them."""
    with Ranks(folder, world, config, **options) as ranks:
        return ranks.finish()
