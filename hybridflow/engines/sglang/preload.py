"""The modules that every SGLang server imports, whatever its model. Fork servers
(`process.fork_server`) import this module."""

from __future__ import annotations

import os

from hybridflow.device.platform import Platform
from hybridflow.engines.sglang.server import sglang_environment

# tokenizer and configuration are in the run's folder
os.environ.update(sglang_environment(Platform.detect().kind), HF_HUB_OFFLINE="1")

from sglang.srt.plugins import load_plugins

load_plugins()  # before importing the patched modules, like sglang/launch_server.py

import sglang.launch_server  # noqa: E402
import sglang.srt.entrypoints.http_server  # noqa: E402, F401
