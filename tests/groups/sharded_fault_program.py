"""Ranks with a sharded model; one dies in a step: `python sharded_fault_program.py 4 hsdp backward`."""

import os
import sys
import time
import warnings

import torch
from sharded_checks import build, meshed, train
from start_program import join, report, start

import thinwire

TIMEOUT_S = 10


def main(rank, world, place, kind, when):
    join(rank, world, place, TIMEOUT_S)
    warnings.simplefilter("ignore")  # of torch's own, about its own functions
    device = torch.device("cpu")
    mesh = meshed(device, 2, world // 2) if kind == "hsdp" else meshed(device, world)
    net = build(device, mesh)
    thinwire.attach(net, "int8", weights="int8", inside="int8" if kind == "hsdp" else None)
    train(net, device, rank, 2)
    if rank == 1:
        die = net.blocks[1].register_forward_pre_hook
        if when == "backward":
            die = net.blocks[0].register_full_backward_hook
        die(lambda *_: os._exit(0))
    began, said = time.monotonic(), "nothing was raised"
    try:
        train(net, device, rank, 3)
    except Exception as error:  # noqa: BLE001
        said = type(error).__name__
    report(rank=rank, said=said, seconds=time.monotonic() - began)
    time.sleep(1)  # the others learn of the dead rank, not of this one
    os._exit(0)


if __name__ == "__main__":
    sys.exit(max(start("fork", int(sys.argv[1]), main, *sys.argv[2:])))
