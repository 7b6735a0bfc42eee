"""Several roles in one process: worker classes that share a rank, its device and its process groups."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from hybridflow.dispatch import MethodSpec, WorkerContext, is_registered, method_spec


class Colocated:
    """One worker of each of `roles`, in their order. Make a class of it with `colocated`."""

    roles: ClassVar[tuple[type, ...]] = ()

    def __init__(self, context: WorkerContext, *arguments: Sequence[Any]) -> None:
        """Construct each role as `role(context, *arguments[i])`."""
        self._workers = [role(context, *args) for role, args in zip(self.roles, arguments, strict=True)]

    def __getattr__(self, name: str) -> Any:
        for worker in self.__dict__.get("_workers", ()):
            if hasattr(worker, name):
                return getattr(worker, name)
        raise AttributeError(f"none of {', '.join(role.__name__ for role in self.roles)} has {name!r}")


def colocated(*roles: type) -> type:
    """A worker class for a `WorkerGroup` whose processes hold one worker of each role; `args` has a tuple of arguments
    for each.

    Methods are called as ever, `group.run(Actor.update, ...)`, `group.run(Reference.log_probs, ...)`; `mesh_position`
    is the first role's.

    Raises:
        ValueError: two roles register a method of the same name.
    """
    owner: dict[str, type] = {}
    for role in roles:
        for name in _registered(role):
            if owner.setdefault(name, role) is not role:
                raise ValueError(
                    f"{owner[name].__name__} and {role.__name__} both have a method {name!r}; roles of one process "
                    f"need others"
                )
    made: dict[str, Any] = {"roles": roles}
    if any(hasattr(role, "mesh_position") for role in roles):  # the group asks the class before it asks the workers
        made["mesh_position"] = lambda self: self.__getattr__("mesh_position")()
    return type("And".join(role.__name__ for role in roles), (Colocated,), made)


def registered(worker_class: type) -> list[str]:
    """Names of the `@register`-ed methods of the class, or of its roles."""
    classes = worker_class.roles if issubclass(worker_class, Colocated) else (worker_class,)
    return [name for found in classes for name in _registered(found)]


def _registered(role: type) -> list[str]:
    return [name for name, function in inspect.getmembers(role, inspect.isfunction) if is_registered(function)]


def owns(worker_class: type, method: Callable[..., Any]) -> bool:
    """Whether `method` is one of the class (or of a base), or of one of its roles."""
    spec: MethodSpec = method_spec(method)
    classes = worker_class.roles if issubclass(worker_class, Colocated) else (worker_class,)
    return any(vars(base).get(spec.name) is method for found in classes for base in inspect.getmro(found))
