"""A group with a single worker in the driver's process, without Ray, messages or other threads, so
that breakpoints work in every method of the worker.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Generator, Sequence
from pathlib import Path
from typing import Any

from hybridflow.dispatch import Mesh, WorkerContext, method_spec, plan_call
from hybridflow.placement.place import PORTS
from hybridflow.process.rendezvous import leave_world
from hybridflow.single_controller.actors import environment
from hybridflow.single_controller.cluster import LOOPBACK
from hybridflow.single_controller.event_loop import computing
from hybridflow.single_controller.host import address_of, free_port


class InProcessGroup:
    """Calls methods of `worker_class(context, *args)` through the same dispatch as a `WorkerGroup`
    with one rank.

    A method's exceptions propagate unchanged. A method that hangs or kills its process also hangs
    or kills the driver.
    """

    def __init__(
        self, worker_class: type, *, role: str, args: Sequence[Any] = (), log_dir: str | Path
    ) -> None:
        """Construct the worker.

        A process can have only one such group at a time. The worker may combine several roles
        (`colocated`).
        """
        self.worker_class = worker_class
        log_path = Path(log_dir).resolve() / f"{role}-rank0.log"
        context = WorkerContext(0, 1, 0, LOOPBACK, free_port(LOOPBACK, PORTS), LOOPBACK, log_path)
        # this process's thread settings are kept
        os.environ.update(
            {
                name: value
                for name, value in environment(context, {}).items()
                if "THREADS" not in name
            }
        )
        try:
            self._worker = worker_class(context, *args)
        except BaseException:
            self.close()
            raise
        self._mesh = (
            Mesh((self._worker.mesh_position(),))
            if hasattr(worker_class, "mesh_position")
            else None
        )

    def run(
        self, method: Callable[..., Any], *args: Any, role: str | None = None, **kwargs: Any
    ) -> Any:
        """Call a method of the worker class.

        `method`, `role` and the return value are the same as for `WorkerGroup.run`.

        Raises:
            SchemaError: arguments or results do not match the method's declaration.
        """
        spec = method_spec(method)
        address = address_of(self.worker_class, method, role)
        plan = plan_call(spec, 1, self._mesh, args, kwargs)
        call = plan.calls[0]
        with computing():
            result = getattr(self._worker, address)(*call.args, **call.kwargs)
        return plan.collect({0: result})

    def call(
        self, method: Callable[..., Any], *args: Any, role: str | None = None, **kwargs: Any
    ) -> Awaitable[Any]:
        """Call the method immediately, like `run`. Awaiting the return value yields the result."""
        return _Done(self.run(method, *args, role=role, **kwargs))

    def close(self) -> None:
        """Leave the process groups that the worker has joined, so that this process can create
        another worker group.
        """
        leave_world()


class _Done:
    """A completed call."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __await__(self) -> Generator[None, None, Any]:
        yield from ()
        return self._value
