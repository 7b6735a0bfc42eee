"""The preparation tasks, one module per task, and their registry."""

from __future__ import annotations

from hybridflow.config.entries import PREPARATIONS as TASKS
from hybridflow.config.entries import Preparation as Task

__all__ = ["TASKS", "Task"]
