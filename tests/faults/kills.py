"""`python -m tests.faults.kills`: processes of conversations are killed at seeded moments, or the
table is written.

A campaign is one run of `kill_driver` that loses a process in several of its steps; whenever its
driver ends, the same command is given again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from hybridflow.data.prepare.tokenizer_files import write_character_tokenizer
from tests.faults.kill_driver import PEAK_MB, SIZE, STEPS, TRAINED, N
from tests.faults.stub_engine import next_token

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 120.0  # without a word from the driver
CHARACTERS = "0123456789" + "".join(chr(code) for code in range(32, 127) if not chr(code).isdigit())
# what of a command line tells a process; the sandbox forks a process for each program
VICTIMS = {
    "engine": "tests.faults.stub_engine",
    "environment worker": "hybridflow.agents.episode_host",
    "MCP server": "/server.py",
    "sandbox": "sandbox_process.py",
    "driver": "tests.faults.kill_driver",
}
# the longest delay of a kill after the moment has begun: about as long as the moment
MOMENTS = {"generate": 0.25, "train": 0.05, "save": 0.03}
STALENESS = (0, 1, 2)
# reasons of conversations that a kill may end
LOSSES = r"was lost|the environment process|has ended"
LOOP = """
from hybridflow.agents.formats.base import Call
from hybridflow.agents.loops.base import agent_loop

@agent_loop("both", gives_rewards=True)
async def both(conversation, tools):
    async with conversation.episode() as episode:
        for turn in range(2):
            text = await conversation.answer()
            step = await episode.step(text)
            conversation.reward(step.reward)
            calls = [Call("tally", {"text": text}), Call("python", {"code": f"print({len(text)} * 3)"})]
            conversation.observe([step.observation, *await tools.results(calls)])
        await conversation.answer()
"""
ENVIRONMENT = """
from hybridflow.agents.environments.base import Step, environment

@environment("digits")
class Digits:
    def reset(self, row):
        self.seen = int(row["ground_truth"])

    def step(self, answer):
        self.seen += len(answer)
        return Step(str(self.seen), float(self.seen % 5), False)
"""
SERVER = """
import json, sys
TOOL = {"name": "tally", "inputSchema": {"type": "object", "properties": {"text": {"type": "string"}}}}
for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    answer = {"jsonrpc": "2.0", "id": asked["id"]}
    if asked["method"] == "initialize":
        answer["result"] = {"protocolVersion": asked["params"]["protocolVersion"], "capabilities": {"tools": {}},
                            "serverInfo": {"name": "tally", "version": "1"}}
    elif asked["method"] == "tools/list":
        answer["result"] = {"tools": [TOOL]}
    elif asked["method"] == "tools/call":
        text = asked["params"]["arguments"]["text"]
        answer["result"] = {"content": [{"type": "text", "text": str(sum(map(ord, text)))}]}
    else:
        answer["error"] = {"code": -32601, "message": "unknown"}
    print(json.dumps(answer), flush=True)
"""


@dataclass(frozen=True)
class Programs:
    """The programs that conversations of a campaign ask.

    Attributes:
        title: what is wrong with them.
        allowed: pattern of an observation that may be there for the right one.
        losses: pattern of the reasons for which a conversation may be masked.
        most_mb: memory that the driver may have held at its peak.
    """

    title: str = ""
    server: str = SERVER
    environment: str = ENVIRONMENT
    tool_timeout_s: float = 60.0
    allowed: str = "(?!)"
    losses: str = LOSSES
    most_mb: float = 1024.0


RIGHT = Programs()


@dataclass(frozen=True)
class Kill:
    """A process to kill: `part` of the way into a moment of a step."""

    victim: str
    moment: str
    step: int
    part: float


@dataclass
class Outcome:
    """What came of one kill."""

    seed: int
    staleness: int
    victim: str
    moment: str  # what the driver had begun last
    step: int
    ended: bool = False  # the driver ended, and the same command was given again
    lost: int = 0  # conversations of the campaign that ended for it and were masked
    seconds: float = -1.0  # until a step was trained; -1: none was any more
    faults: list[str] = field(default_factory=list)


def product(seed: int) -> list[tuple[int, list[Kill]]]:
    """Every victim at every moment with every staleness, at steps and times that the seed draws, as
    campaigns: the staleness, and a kill for each of some steps."""
    drawn = random.Random(seed)
    found = list[tuple[int, list[Kill]]]()
    for staleness in STALENESS:
        pairs = list(itertools.product(VICTIMS, MOMENTS)) * 2
        drawn.shuffle(pairs)
        for start in range(0, len(pairs), STEPS - 1):
            part = pairs[start : start + STEPS - 1]
            steps = sorted(drawn.sample(range(STEPS), len(part)))
            kills = [
                Kill(*pair, step, drawn.random()) for pair, step in zip(part, steps, strict=True)
            ]
            found.append((staleness, [_possible(kill) for kill in kills]))
    return found


def covering(seed: int) -> list[Kill]:
    """Every victim once, in one run."""
    drawn = random.Random(seed)
    victims = drawn.sample(list(VICTIMS), len(VICTIMS))
    return [
        _possible(Kill(victim, drawn.choice(list(MOMENTS)), step, drawn.random()))
        for step, victim in enumerate(victims)
    ]


def _possible(kill: Kill) -> Kill:
    """A checkpoint is of the number of steps that are done, one more than that of the step."""
    return Kill(kill.victim, kill.moment, kill.step + (kill.moment == "save"), kill.part)


def play(
    seed: int, staleness: int, todo: Sequence[Kill], folder: Path, programs: Programs = RIGHT
) -> list[Outcome]:
    """Give the command until the run has finished; an outcome for each process that was killed."""
    write_character_tokenizer(folder / "tokenizer", CHARACTERS)
    files = {
        "loop.py": LOOP,
        "environment.py": programs.environment,
        "server.py": programs.server,
        "tool_timeout_s": str(programs.tool_timeout_s),
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    outcomes = list[Outcome]()
    left = list(todo)
    code = -1
    said = ""
    for _ in range(3 * len(todo) + 3):
        code, said = _start(folder, seed, staleness, left, outcomes)
        if code == 0:
            break
        if outcomes:
            outcomes[-1].ended = True
        if code != -signal.SIGKILL and "failed in all" not in said:
            break
    for one in outcomes:
        one.seconds = max(one.seconds, -1.0)
    last = outcomes[-1] if outcomes else Outcome(seed, staleness, programs.title, "", 0)
    if code != 0:
        last.faults.append(f"the run does not finish: code {code}, {said[-600:]}")
    if remaining := _left_behind(folder):
        last.faults.append(f"left behind: {remaining}")
    if code == 0:
        may_lose = programs is not RIGHT or any(_loses(one) for one in outcomes)
        faults, lost = differences(folder, staleness, may_lose, programs)
        last.faults += faults
        last.lost = lost
        peak_mb = float((folder / PEAK_MB).read_text())
        if peak_mb > programs.most_mb:
            last.faults.append(f"the driver held {peak_mb:.0f} MB")
    # of a run that ended before anything was killed, what is wrong with it
    return outcomes or [last]


def _left_behind(folder: Path) -> list[int]:
    """Processes of the run that are still there after a while: those of a killed driver need a
    moment to end."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        found = [
            process.pid for process in psutil.process_iter() if str(folder) in _command(process)
        ]
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


def _loses(outcome: Outcome) -> bool:
    return outcome.victim in ("environment worker", "MCP server")


def _start(
    folder: Path, seed: int, staleness: int, left: list[Kill], outcomes: list[Outcome]
) -> tuple[int, str]:
    """One start of the driver; its exit status, and what it said last."""
    command = [sys.executable, "-m", "tests.faults.kill_driver", str(folder), str(staleness)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with (
        (folder / "errors").open("wb") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, cwd=ROOT, env=environment
        ) as driver,
    ):
        try:
            _watch(driver, seed, staleness, left, outcomes)
        except BaseException:
            driver.kill()
            raise
        return driver.wait(PATIENCE_S), (folder / "errors").read_text(errors="replace")


def _watch(
    driver: subprocess.Popen[bytes],
    seed: int,
    staleness: int,
    left: list[Kill],
    outcomes: list[Outcome],
) -> None:
    """Kill what is due until the driver ends."""
    assert driver.stdout is not None
    text = b""
    now = ("start", 0)
    due = None
    while True:
        wait_s = PATIENCE_S if due is None else max(due - time.monotonic(), 0.0)
        if select.select([driver.stdout], [], [], wait_s)[0]:
            part = os.read(driver.stdout.fileno(), 1 << 16)
            if not part:
                return
            *lines, text = (text + part).split(b"\n")
            for line in lines:
                moment, step = line.decode().split()
                now = (moment, int(step))
                _time(outcomes, moment)
            if left and due is None and _order(*now) >= _order(left[0].moment, left[0].step):
                due = time.monotonic() + left[0].part * MOMENTS[left[0].moment]
        elif due is None:
            driver.kill()
            raise TimeoutError(f"no word of the driver for {PATIENCE_S:g} s, the last was {now}")
        if due is not None and time.monotonic() >= due:
            due = None
            if _kill(driver, left[0].victim):  # else it has not begun yet; the next moment will do
                outcomes.append(
                    Outcome(seed, staleness, left.pop(0).victim, *now, seconds=-time.monotonic())
                )


def _order(moment: str, step: int) -> tuple[int, int]:
    """When in a run: a checkpoint has the number of the step that follows."""
    return step, ("start", "save", "generate", "train", "end").index(moment)


def _time(outcomes: Sequence[Outcome], moment: str) -> None:
    """The next step is trained: its answers have come."""
    for one in outcomes:
        if moment == "train" and one.seconds < 0:
            one.seconds += time.monotonic()


def _kill(driver: subprocess.Popen[bytes], victim: str) -> bool:
    """Kill one process of this kind with SIGKILL; whether there was one."""
    try:
        family = [psutil.Process(driver.pid), *psutil.Process(driver.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return (
            victim == "driver"
            and driver.poll() is not None
            and driver.returncode == -signal.SIGKILL
        )
    found = [one for one in family if VICTIMS[victim] in _command(one)]
    for one in found[:1]:
        one.send_signal(signal.SIGKILL)
    return bool(found)


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def differences(
    folder: Path, staleness: int, may_lose: bool, programs: Programs = RIGHT
) -> tuple[list[str], int]:
    """What is wrong with what was trained, and the number of conversations that were lost: prompts,
    groups, tokens, versions, observations."""
    steps = {}
    for line in (folder / TRAINED).read_text().splitlines():
        # a step that a killed driver had not saved is trained again: the last counts
        one = json.loads(line)
        steps[one["step"]] = one
    faults = [] if sorted(steps) == list(range(STEPS)) else [f"steps {sorted(steps)}"]
    prompts = Counter[int]()
    lost = 0
    for step, one in steps.items():
        of_step = [row[1] - 3 for row in one["prompt_ids"]]
        if (
            len(of_step) != SIZE * N
            or of_step[::N] != of_step[1::N]
            or one["uid"] != sorted(one["uid"])
        ):
            faults.append(f"step {step}: the groups are {of_step}")
        prompts.update(of_step[::N])
        for row in range(len(of_step)):
            of_row = {name: one[name][row] for name in one if name != "step"}
            found = _row_faults(of_row, step, staleness, programs)
            faults += [f"step {step}, row {row}: {fault}" for fault in found]
            lost += one["agent_failure"][row] is not None
    if prompts != Counter(range(SIZE * STEPS)):
        faults.append(f"prompts: {sorted(prompts.elements())}")
    if lost and not may_lose:
        faults.append(f"{lost} conversations were lost, and no process that they need was killed")
    return faults, lost


def _row_faults(
    row: dict[str, object], step: int, staleness: int, programs: Programs
) -> Iterator[str]:
    prompt, ids, mask, log_probs, versions = (
        list(row[name])  # type: ignore[call-overload]
        for name in (
            "prompt_ids",
            "response_ids",
            "response_mask",
            "rollout_log_probs",
            "response_versions",
        )
    )
    if (failure := row["agent_failure"]) is not None:
        if any(mask) or not re.search(programs.losses, str(failure)):
            yield f"failed with {failure!r}, {sum(mask)} tokens to train"
        return
    sampled = [place for place, is_sampled in enumerate(mask) if is_sampled]
    if not sampled or any(ids[place] != next_token([*prompt, *ids[:place]]) for place in sampled):
        yield "a token does not follow from those before it"
    if any(log_probs[place] != -ids[place] for place in sampled):
        yield "a log-probability is another token's"
    made = [versions[place] for place in sampled]
    if (
        made != sorted(made)
        or not step - staleness <= min(made, default=step) <= max(made, default=step) <= step
    ):
        yield f"versions {sorted(set(made))}"
    yield from _observation_faults(row, prompt[1] - 3, programs.allowed)


def _observation_faults(row: dict[str, object], seen: int, allowed: str) -> Iterator[str]:
    messages: list[dict[str, str]] = row["messages"]  # type: ignore[assignment]
    shown = [one["content"] for one in messages if one["role"] == "tool"]
    rewards = list[float]()
    for place, text in enumerate(one["content"] for one in messages if one["role"] == "assistant"):
        if place == 2:
            break
        seen += len(text)
        rewards.append(float(seen % 5))
        wanted = [str(seen), str(sum(map(ord, text))), f"{len(text) * 3}\n"]
        told = shown[3 * place : 3 * place + 3]
        if told and any(
            one != right and not re.match(allowed, one)
            for one, right in zip(told, wanted, strict=True)
        ):
            yield f"observed {[one[:200] for one in told]}, expected {wanted}"
    if row["turn_rewards"] != rewards:
        yield f"rewards {row['turn_rewards']}, expected {rewards}"


def main() -> int:
    """Exit status 1 when a campaign had a fault."""
    from tests.faults import kills_table, liars

    parser = argparse.ArgumentParser(
        prog="python -m tests.faults.kills", description=__doc__, allow_abbrev=False
    )
    parser.add_argument(
        "--seed", type=int, default=1, help="of the first product; each next one has the next seed"
    )
    parser.add_argument("--products", type=int, default=1, help="how many to play")
    parser.add_argument(
        "--liars",
        action="store_true",
        help="kill nothing: let an MCP server lie and an environment return 100 MB",
    )
    parser.add_argument("--campaign", type=int, help="play this one of each product alone")
    parser.add_argument(
        "--outcomes", type=Path, default=ROOT / "runs" / "kills.jsonl", help="file of all outcomes"
    )
    parser.add_argument("--table", action="store_true", help="write docs/kills.md")
    args = parser.parse_args()
    if args.table:
        lines = args.outcomes.read_text().splitlines() if args.outcomes.exists() else []
        (ROOT / "docs" / "kills.md").write_text(
            kills_table.page([Outcome(**json.loads(line)) for line in lines])
        )
        return 0
    status = 0
    args.outcomes.parent.mkdir(parents=True, exist_ok=True)
    todo: list[tuple[str, int, int, list[Kill], Programs]] = []
    for seed in range(args.seed, args.seed + args.products):
        if args.liars:
            todo += [
                (f"seed {seed}", seed, staleness, [], programs)
                for programs in (liars.LYING_SERVER, liars.LARGE_ENVIRONMENT)
                for staleness in STALENESS
            ]
            continue
        todo += [
            (f"seed {seed}.{number}", seed, staleness, kills, RIGHT)
            for number, (staleness, kills) in enumerate(product(seed))
            if args.campaign in (None, number)
        ]
    for title, seed, staleness, kills, programs in todo:
        with tempfile.TemporaryDirectory(prefix="hybridflow-kills-", dir="/tmp") as name:
            outcomes = play(seed, staleness, kills, Path(name), programs)
        with args.outcomes.open("a") as file:
            file.writelines(json.dumps(outcome.__dict__) + "\n" for outcome in outcomes)
        for one in outcomes:
            where = f"{title}, staleness {staleness}: {one.victim} in {one.moment} {one.step}"
            print(f"{where} {one.seconds:.1f} s: {'; '.join(one.faults) or 'ok'}", flush=True)
            status |= bool(one.faults)
    return status


if __name__ == "__main__":
    sys.exit(main())
