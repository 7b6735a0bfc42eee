"""Preparations by name, one module each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridflow.config.registry import Registry


@dataclass(frozen=True)
class Task:
    """A preparation: its options and how its files are written.

    Attributes:
        options: frozen dataclass; its fields are the option names, with types, ranges and defaults as in
            `hybridflow.config.schema`.
        write: writes every file of the task into an existing empty folder and returns rows per parquet file.
        source_files: names of the raw files the task reads; empty when it needs none.
    """

    options: type
    write: Callable[[Any, Path, Path | None], dict[str, int]]
    source_files: tuple[str, ...] = ()


TASKS: Registry[Task] = Registry("preparation task", "hybridflow.data.prepare.tasks", "data.prepare.task")
