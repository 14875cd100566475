"""Wrappers of several processes: training through them stays what it is, and scoring inside them is refused by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = """
import json, sys
import torch, torch.distributed as dist
from torch import nn
import inrun
from inrun.errors import ConfigurationError, StepError

rank, folder, static = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "static"
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
told = {}


def final(attach):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    wrapped = nn.parallel.DistributedDataParallel(model, static_graph=static)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(rank))
    accountant = inrun.Accountant(model, optimizer, lambda m: m(x[0][:1]).square().sum(), credit="step") if attach else None
    for rows in x:
        wrapped(rows).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if accountant is not None:
        try:
            with accountant.step(range(5)):
                wrapped(x[0]).square().sum().backward()
        except StepError as error:
            told["step"] = str(error)
        accountant.close()
        try:
            inrun.Accountant(wrapped, optimizer, lambda m: m(x[0]).sum(), credit="step")
        except ConfigurationError as error:
            told["model"] = str(error)
    return [p.detach().clone() for p in model.parameters()]


plain, attached = final(False), final(True)
told["same"] = all(torch.equal(a, b) for a, b in zip(plain, attached))
others = [torch.zeros_like(attached[0]) for _ in range(2)]
dist.all_gather(others, attached[0])
told["averaged"] = torch.equal(*others)
if rank == 0:
    print(json.dumps(told))
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without torch.distributed")
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_training_through_ddp_is_left_alone_and_scoring_is_refused(kind: str, tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path), kind], stdout=subprocess.PIPE, text=True, env=environment)
        for rank in (0, 1)
    ]
    out = [rank.communicate(timeout=120)[0] for rank in ranks]
    told = json.loads(out[0])
    assert told["same"]
    assert told["averaged"]
    assert "DistributedDataParallel" in told["step"]
    assert "not supported yet" in told["step"]
    assert "model.module" in told["model"]
