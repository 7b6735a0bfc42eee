"""A group of one worker in the driver's own process: no Ray, no messages, no other thread. A breakpoint works in every
method of the worker."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hybridflow.dispatch import Mesh, WorkerContext, method_spec, plan_call
from hybridflow.placement.place import PORTS
from hybridflow.process.rendezvous import leave_world
from hybridflow.single_controller.actors import environment
from hybridflow.single_controller.cluster import LOOPBACK
from hybridflow.single_controller.colocate import address_of
from hybridflow.single_controller.future import waiting
from hybridflow.single_controller.host import free_port
from hybridflow.single_controller.pending import Ended


class InProcessGroup:
    """`worker_class(context, *args)`, called as a `WorkerGroup` of one rank is, through the same dispatch.

    What a method raises arrives as it was raised. A method that hangs, or kills the process, takes the driver along.
    """

    def __init__(self, worker_class: type, *, role: str, args: Sequence[Any] = (), log_dir: str | Path) -> None:
        """Construct the worker; a process has one group at a time; its worker may have several roles (`colocated`)."""
        self.worker_class = worker_class
        log_path = Path(log_dir).resolve() / f"{role}-rank0.log"
        context = WorkerContext(0, 1, 0, LOOPBACK, free_port(LOOPBACK, PORTS), LOOPBACK, log_path)
        # its threads are those that the process has already
        os.environ.update({name: value for name, value in environment(context, {}).items() if "THREADS" not in name})
        try:
            self._worker = worker_class(context, *args)
        except BaseException:
            self.close()
            raise
        self._mesh = Mesh((self._worker.mesh_position(),)) if hasattr(worker_class, "mesh_position") else None

    def run(self, method: Callable[..., Any], *args: Any, role: str | None = None, **kwargs: Any) -> Any:
        """Call a method of the worker class; `method` and `role` as for `WorkerGroup.run`, and so is what returns.

        Raises:
            SchemaError: arguments or results do not fit the declaration of the method.
        """
        spec, address = method_spec(method), address_of(self.worker_class, method, role)
        plan = plan_call(spec, 1, self._mesh, args, kwargs)
        call = plan.calls[0]
        with waiting():
            result = getattr(self._worker, address)(*call.args, **call.kwargs)
        return plan.collect({0: result})

    def close(self) -> None:
        """Leave the world that the worker has joined, so that this process can have another group."""
        leave_world()

    def submit(self, method: Callable[..., Any], *args: Any, role: str | None = None, **kwargs: Any) -> Ended:
        """As `run`, which it does at once: the call that is returned has ended."""
        return Ended(self.run(method, *args, role=role, **kwargs))
