"""Verifier for the format of a response: checks its structure, regardless of its content."""

from __future__ import annotations

import re

from hybridflow.rewards.verifiers.base import ScoreResult, verifier


@verifier("format", data_sources=["format"], runs_in_driver=True)
def format(
    response: str,
    ground_truth: object,
    *,
    sections: tuple[str, ...] = ("think", "answer"),
    thinking_open: bool | None = None,
) -> ScoreResult:
    """Return 1.0 if the response consists of exactly these sections, each of them once and not
    empty: <think>...</think> <answer>...</answer>.

    Args:
        sections: names of the tags, in order.
        thinking_open: True if the prompt ends with the first tag, so that the response starts after
            it. None means unknown: a response without the tag is assumed to start after it.
    """
    tags: list[str] = []
    for name in sections:
        tags += (f"<{name}>", f"</{name}>")
    text = response.strip()
    if thinking_open or (thinking_open is None and tags[0] not in text):
        text = tags[0] + text.removeprefix(tags[0])
    known = "|".join(map(re.escape, tags))
    between = re.split(known, text)  # before, within, between and after the sections
    right = re.findall(known, text) == tags and not any(map(str.strip, between[::2]))
    return ScoreResult(float(right and all(map(str.strip, between[1::2]))))
