"""Words of a script's command, compared with those that bash passes."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from hybridflow.migrate.shell import command_of

ENVIRONMENT = {"HOME": "/a home of mine", "NODES": "4"}
COMMAND = 'python3 -m verl.trainer.main_ppo a=1 "b=${B}" c=$C'
SCRIPTS = {
    "defaults": "B=${NODES:-1}\nC=${GPUS:-8}\n",
    "nested defaults": 'A=2\nB=${X:-$A}\nC=${Y:-"${HOME}/data"}\n',
    "arithmetic": "n=8\nB=$((1024 * 2))\nC=$(((n + 2) * n / 3 - 7 % 4))\n",
    "quotes": "x=1\nB=\"['$x', '${x}b']\"\nC='$x'\"$x\"\\$x\n",
    "comments": "B=1 # not c\nC=a#b # c\n# B=2\n",
    "export": 'export B=1\nexport C="two"\n',
    "semicolons": "B=1; C=2; set -x\n",
    "appended": "B=a\nB+=b\nC=\n",
    "true condition": 'B=1\nif [[ $NODES == "4" ]]; then\n  C=4\nelse\n  C=0\nfi\n',
    "false condition": "B=1\nif [ $NODES -eq 2 ]; then C=2; elif [ $B = 1 ]; then C=1; else C=0; fi\n",
    "nested conditions": (
        "B=1\nC=0\nif [ $B = 2 ]; then\n if [ 1 = 1 ]; then C=3; fi\nelse\n C=5\nfi\n"
    ),
    "split words": 'B=1\nC="1 d=2  e=3"\n',
    "other commands": "mkdir -p nowhere/at/all 2>/dev/null || true\nB=1\nC=2\n",
}
LINES = {
    "continued": 'B=1\nC=2\npython3 -m verl.trainer.main_ppo \\\n    a=$B \\\n    "b=$C" $@\n',
    "array": 'P=(\n  x=1 # first\n  "y=a b"\n)\nP+=(z=3)\npython3 -m verl.trainer.main_ppo "${P[@]}" q=1\n',
    "logged": 'python3 -m verl.trainer.main_ppo logger=\'["console","wandb"]\' 2>&1 | cat\n',
}


def of_bash(script: str, folder: Path) -> list[str]:
    """What bash passes to python3."""
    program = 'python3() { printf "%s\\0" python3 "$@"; }\n' + script
    done = subprocess.run(
        [str(shutil.which("bash")), "--noprofile", "--norc", "-c", program],
        env={**ENVIRONMENT, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        timeout=20,
    )
    return done.stdout.split("\0")[:-1]


@pytest.mark.parametrize("name", SCRIPTS)
def test_variables_are_those_of_bash(name: str, tmp_path: Path) -> None:
    script = SCRIPTS[name] + COMMAND + "\n"
    assert command_of(script, "main_ppo", ENVIRONMENT).words == of_bash(script, tmp_path)


@pytest.mark.parametrize("name", LINES)
def test_commands_are_those_of_bash(name: str, tmp_path: Path) -> None:
    found = command_of(LINES[name], "main_ppo", ENVIRONMENT).words
    assert [word for word in found if not word.startswith("2>")] == of_bash(LINES[name], tmp_path)


def test_nothing_is_run_and_what_is_not_known_is_noted() -> None:
    script = (
        "A=$(touch /tmp/never)\nB=`id`\nif grep -q x y; then A=3; fi\nrun main_ppo a=$A b=$B c=$D\n"
    )
    found = command_of(script, "main_ppo", {})
    assert found.words == ["run", "main_ppo", "a=", "b=", "c="]
    assert len(found.notes) == 4 and "touch /tmp/never" in found.notes[0]
    assert "assumed to be false" in found.notes[2] and "$D has no value" in found.notes[3]


@pytest.mark.parametrize("script", ["main_ppo 'a", 'main_ppo "a', "A=(a b", "main_ppo ${A", "A=`b"])
def test_what_is_not_closed_is_refused(script: str) -> None:
    with pytest.raises(ValueError, match="unclosed"):
        command_of(script, "main_ppo", {})
