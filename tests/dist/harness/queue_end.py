"""One rank's end of SGLang's queue of messages, on a node of its own: `queue_end.py RANK ADDRESS
MEET_AT`. Prints where the queue is and what came through it, as JSON."""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta

from hybridflow.engines.sglang.server import environment
from hybridflow.engines.spec import EngineSpec


def main(rank: int, address: str, meet_at: str) -> None:
    """Join the other rank as the ranks of an engine over two nodes do; rank 0 sends."""
    spec = EngineSpec(
        "e", "/nowhere", tensor=2, nnodes=2, node_rank=rank, host=address, dist_init_addr=meet_at
    )
    os.environ.update(environment(spec, "/nowhere"))
    import torch.distributed as dist
    from sglang.srt.distributed.device_communicators.shm_broadcast import MessageQueue

    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{meet_at}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=120),
    )
    queue = MessageQueue.create_from_process_group(dist.group.WORLD, 1 << 20, 6)
    print(
        json.dumps([queue.handle.connect_ip, queue.broadcast_object("sent" if rank == 0 else None)])
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
