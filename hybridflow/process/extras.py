"""Mapping from missing modules to the package extras that install them."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

from hybridflow.errors import ResourceError

# import name -> (distribution, extra); an empty extra: a dependency of the package itself
MODULES = {
    **{
        name: (name, "")
        for name in ("numpy", "pyarrow", "jinja2", "rich", "psutil", "xxhash", "omegaconf")
    },
    "hydra": ("hydra-core", ""),
    "yaml": ("PyYAML", ""),
    **{
        name: (name, "train")
        for name in ("torch", "ray", "transformers", "safetensors", "tensorboard", "perfetto")
    },
    "megatron": ("megatron-core", "train"),
    "tokenizers": ("tokenizers", "train"),
    "jsonschema": ("jsonschema", "bench"),
    "math_verify": ("math-verify", "math"),
    "huggingface_hub": ("huggingface-hub", "hub"),
    **{name: (name, name) for name in ("wandb", "mlflow", "trackio")},
}

KERNELS = "hybridflow_kernels"
# part of the package, unless the package was built from a subset of the files
WITHOUT_KERNELS = (
    f"{KERNELS} is not installed: this installation was built without the folder kernels/; copy "
    "it as in launch/containers/Dockerfile and rebuild the image, or pip install the whole "
    "checkout"
)


def require(*modules: str) -> None:
    """Raise ModuleNotFoundError if one of these modules is not installed. Call it before starting
    processes that need them.
    """
    for name in modules:
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def missing_package(error: ModuleNotFoundError, user: str = "this command") -> str | None:
    """Return a message that names the package to install, or None if no extra provides the
    module."""
    module = (error.name or "").partition(".")[0]
    if module == KERNELS:
        return WITHOUT_KERNELS
    found = MODULES.get(module)
    if found is None:
        return None
    distribution, extra = found
    wanted = f"'hybridflow[{extra}]'" if extra else distribution
    return f"{user} needs {distribution}, which is not installed here: pip install {wanted}"


@contextmanager
def naming_packages(user: str) -> Iterator[None]:
    """Context manager: if an import in the block fails because a package from an extra is missing,
    raise a ResourceError that names the package to install.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        message = missing_package(error, user)
        if message is None:
            raise
        raise ResourceError(message) from error
