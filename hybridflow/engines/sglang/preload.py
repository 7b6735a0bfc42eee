"""What a server of SGLang imports before it knows its model; importing this module imports it, for
processes that fork servers (`process.fork_server`)."""

from __future__ import annotations

import os

from hybridflow.device.platform import Platform
from hybridflow.engines.sglang.server import sglang_environment

# their tokenizer and configuration lie in the run's folder
os.environ.update(sglang_environment(Platform.detect().kind), HF_HUB_OFFLINE="1")

from sglang.srt.plugins import load_plugins

load_plugins()  # before what they change is imported, as sglang/launch_server.py does

import sglang.launch_server  # noqa: E402
import sglang.srt.entrypoints.http_server  # noqa: E402, F401
