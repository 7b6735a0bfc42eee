"""Packaging: the kernels under their import name, recipes and job files inside the package, and the
entry points.

Everything else is in pyproject.toml.
"""

from pathlib import Path

from setuptools import find_packages, setup

# `config.locate` finds them
SHIPPED = {"hybridflow.shipped.configs": "configs", "hybridflow.shipped.launch": "launch"}
if missing := [name for name in ("kernels", *SHIPPED.values()) if not Path(name).is_dir()]:
    raise SystemExit(
        f"hybridflow is built from folders that are missing here: {', '.join(missing)}; copy them, "
        "as launch/containers/Dockerfile does, and build again"
    )
setup(
    packages=[
        *find_packages(include=["hybridflow", "hybridflow.*"]),
        "hybridflow_kernels",
        *SHIPPED,
    ],
    package_dir={"hybridflow_kernels": "kernels", **SHIPPED},
    package_data={
        "hybridflow": ["**/*.html", "**/*.j2", "**/*.schema.json", "py.typed", "*.pyi"],
        **{package: ["*", "*/*"] for package in SHIPPED},
    },
    entry_points={
        "console_scripts": ["hybridflow = hybridflow.cli.main:main"],
        "sglang.srt.platforms": ["hybridflow_cpu = hybridflow.engines.sglang.cpu_plugin:activate"],
        "sglang.srt.plugins": [
            "hybridflow_cpu_hooks = hybridflow.engines.sglang.cpu_plugin.hooks:register"
        ],
    },
)
