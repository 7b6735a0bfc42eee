"""`hybridflow.Run(where="slurm")`: submission of the calling program as a Slurm job."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

from hybridflow.config.schema import RunConfig
from hybridflow.errors import ConfigError, did_you_mean
from hybridflow.launch.driver import ADDRESS, PROGRAM
from hybridflow.launch.submission import Options, in_a_job, job_of


def job_address() -> str | None:
    """Return the address of the job's Ray cluster if this program is the driver of a job."""
    return os.environ.get(ADDRESS)


def options_of(given: Mapping[str, Any]) -> Options:
    """Convert a mapping to submission options.

    Raises:
        ConfigError: an option is unknown, or is not supported for programs.
    """
    names = [field.name for field in fields(Options) if field.name != "array"]
    for name in given:
        if name == "array":
            raise ConfigError(
                'slurm={"array": ...}: a program cannot be a job array; submit it in a loop, with '
                "a different name for each run"
            )
        if name not in names:
            hint = did_you_mean(name, names)
            raise ConfigError(f"slurm: unknown option {name}{hint} (known: {', '.join(names)})")
    site = given.get("site")
    return Options(**{**given, "site": None if site is None else Path(site)})


def checked_for_a_job(config: RunConfig, words: list[str]) -> RunConfig:
    """Check the configuration, and return the one that the job will use.

    Raises:
        ConfigError: the run cannot be submitted as a job.
    """
    if config.cluster.in_process:
        raise ConfigError(
            'where="slurm" with cluster.in_process=true: a run in one process needs no Ray; set '
            'where="here" and submit the program with sbatch, or choose another cluster'
        )
    return in_a_job(config, words)


def submit(config: RunConfig, options: Options) -> NoReturn:
    """Submit this program as the run's job, and exit.

    Raises:
        ConfigError: there is no program file that a job could run.
        ResourceError: Slurm is not installed, or it rejects the job.
    """
    from hybridflow.launch import slurm
    from hybridflow.launch.job import render

    site = options.read_site()
    job = job_of(config, _program(), options, site)
    number = slurm.submit(job, render(job, site))
    print(slurm.submitted(job, number, site))
    raise SystemExit(0)


def _program() -> list[str]:
    """Return the command of a job that runs this program with its arguments."""
    main = sys.modules["__main__"]
    if spec := getattr(main, "__spec__", None):
        # `python -m a.b`; `python -m a` runs a.__main__
        name = spec.name.removesuffix(".__main__")
        return [PROGRAM, "-m", name, *sys.argv[1:]]
    file = getattr(main, "__file__", None)
    if file is None or not Path(file).is_file():
        raise ConfigError(
            'where="slurm" submits the program\'s file, but a notebook or interactive '
            "prompt has none; move the run into a file and start it with python"
        )
    return [PROGRAM, str(Path(file).resolve()), *sys.argv[1:]]
