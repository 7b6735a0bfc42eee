"""Colocated roles: several worker classes in one process. They share its rank, its device and its
process groups.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from hybridflow.dispatch import MethodSpec, WorkerContext, method_spec


class Colocated:
    """A worker that contains one worker per role, in the order of `roles`. Use `colocated` to
    create a subclass.
    """

    roles: ClassVar[Mapping[str, type]] = {}

    def __init__(self, context: WorkerContext, *arguments: Sequence[Any]) -> None:
        """Construct each role as `role(context, *arguments[i])`. Later roles find earlier ones in
        `context.neighbours`."""
        self._workers: dict[str, Any] = {}
        inside = replace(context, neighbours=self._workers)
        for (name, role), args in zip(self.roles.items(), arguments, strict=True):
            self._workers[name] = role(inside, *args)

    def __getattr__(self, address: str) -> Any:
        """Look up `ROLE.METHOD`, the format returned by `address_of`."""
        role, _, method = address.partition(".")
        try:
            return getattr(self.__dict__["_workers"][role], method)
        except KeyError:
            raise AttributeError(
                f"the role of {address!r} must be one of {', '.join(self.roles)}"
            ) from None


def colocated(**roles: type) -> type:
    """Create a worker class whose processes contain one worker of each role.

    The group's `args` is a tuple of arguments per role.

    Methods are called as usual: `group.run(Actor.update, ...)`. If several roles have the method,
    select one with `role`: `group.run(Model.save, ..., role="critic")`. `mesh_position` is taken
    from the first role that defines it.
    """
    made: dict[str, Any] = {"roles": roles}
    placed = [name for name, role in roles.items() if hasattr(role, "mesh_position")]
    if placed:  # the group checks the class for this method before calling the workers
        made["mesh_position"] = lambda self: getattr(self, f"{placed[0]}.mesh_position")()
    return type("And".join(role.__name__ for role in roles.values()), (Colocated,), made)


def address_of(worker_class: type, method: Callable[..., Any], role: str | None) -> str:
    """Return the name under which a process of `worker_class` calls `method`.

    It includes the role if the class is colocated.

    Raises:
        TypeError: the class or role has no such method, or several roles have one and `role` is
            None.
    """
    spec: MethodSpec = method_spec(method)
    called = f"{getattr(method, '__qualname__', method)}"
    if not issubclass(worker_class, Colocated):
        if not _owns(worker_class, method, spec):
            raise TypeError(f"{called} is not a method of {worker_class.__name__}")
        return spec.name
    owners = [
        name
        for name, found in worker_class.roles.items()
        if role in (None, name) and _owns(found, method, spec)
    ]
    if len(owners) != 1:
        problem = (
            f"belongs to {' and '.join(owners)}: pass role=" if owners else "is not a method of"
        )
        raise TypeError(f"{called} {problem} {role or ', '.join(worker_class.roles)}")
    return f"{owners[0]}.{spec.name}"


def _owns(worker_class: type, method: Callable[..., Any], spec: MethodSpec) -> bool:
    return any(vars(base).get(spec.name) is method for base in inspect.getmro(worker_class))
