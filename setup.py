"""Packaging: the console script, the SGLang entry points and the configs shipped beside the package.

Dependencies are not listed here on purpose: each lane (cpu, gpu, dev) has its own lock under requirements/, because the
order of installation matters (torch first and alone, SGLang without its dependencies); `make setup` does it.
"""

from pathlib import Path

from setuptools import find_packages, setup

root = Path(__file__).parent
shipped = [root / "configs", root / "launch"]
setup(
    name="hybridflow",
    version="0.1.0",
    description="Megatron-first trainer for reinforcement learning of large language models",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=[*find_packages(include=["hybridflow", "hybridflow.*"]), "hybridflow_kernels"],
    package_dir={"hybridflow_kernels": "kernels"},
    package_data={"hybridflow": ["**/*.html", "**/*.j2", "**/*.schema.json"]},
    data_files=[
        (f"share/hybridflow/{folder.relative_to(root)}", [str(f) for f in sorted(folder.glob("*.*"))])
        for top in shipped
        for folder in [top, *sorted(p for p in top.rglob("*") if p.is_dir())]
    ],
    entry_points={
        "console_scripts": ["hybridflow = hybridflow.cli.main:main"],
        "sglang.srt.platforms": ["hybridflow_cpu = hybridflow.engines.sglang.cpu_plugin:activate"],
        "sglang.srt.plugins": ["hybridflow_cpu_hooks = hybridflow.engines.sglang.cpu_plugin.hooks:register"],
    },
)
