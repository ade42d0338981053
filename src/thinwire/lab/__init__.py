"""Emulated hosts on one machine: real sockets, real packets, links of a rate you choose.

    with Lab(hosts=4, link="1gbit") as lab:
        run = lab.run(["python", "train.py"], timeout_s=60)
    print(run.returncodes, run.counters[0].sent_nbytes)

Every rank is a process in a network namespace of its own; a bridge joins them; `tc tbf` throttles every link
both ways. Needs Linux, root and iproute2; `Lab(hosts=4, loopback=True)` needs nothing and throttles nothing.
Ranks may use the machine's GPUs and share them: to NCCL every rank is a host of its own.
"""

from thinwire.errors import LabError as LabError
from thinwire.lab.gpus import Gpus as Gpus
from thinwire.lab.hosts import Lab as Lab
from thinwire.lab.hosts import clean as clean
from thinwire.lab.namespaces import Counters as Counters
from thinwire.lab.sessions import Run as Run
from thinwire.lab.sessions import Session as Session
from thinwire.lab.topology import Link as Link
from thinwire.lab.topology import Topology as Topology

__all__ = ["Counters", "Gpus", "Lab", "LabError", "Link", "Run", "Session", "Topology", "clean"]
