"""Checks of a folder's tokenizer and chat template, using a sample conversation, and of the model's
vocabulary size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hybridflow.agents.call_reading import format_of
from hybridflow.data.chat_template import TemplateReport
from hybridflow.data.tokenizer import Tokenizer, load_tokenizer
from hybridflow.doctor.findings import Finding
from hybridflow.errors import DataError

_SAMPLE = "Solve 12 + 345 = ?\n\tdef f(x): return x ** 2  # Größe, 你好，世界 🙂"


def findings(folder: Path, hf: Mapping[str, Any], observed: str | None) -> Iterator[Finding]:
    """Yield findings on the tokenizer, the vocabulary, end tokens and the template's turns.

    Args:
        observed: role of the messages that a recipe inserts after answers; None if the answer ends
            the conversation.
    """
    try:
        tokenizer = load_tokenizer(folder)
    except DataError as error:
        yield Finding(
            "tokenizer",
            "error",
            str(error),
            "set model.tokenizer to a folder with a complete tokenizer",
        )
        return
    ids = tokenizer.encode(_SAMPLE)
    if tokenizer.decode(ids) != _SAMPLE:
        what = f"{_SAMPLE!r} becomes {tokenizer.decode(ids)!r}"
        yield Finding(
            "tokenizer",
            "warning",
            what,
            "answers will be decoded this way; compare with the model's own examples",
        )
    else:
        what = (
            f"{tokenizer.vocab_size:,} tokens; {len(_SAMPLE)} characters of text and code "
            f"round-trip through {len(ids)} tokens"
        )
        yield Finding("tokenizer", "ok", what)
    yield _vocabulary(tokenizer, hf)
    yield from _template(tokenizer, observed)


def _vocabulary(tokenizer: Tokenizer, hf: Mapping[str, Any]) -> Finding:
    rows = int(hf.get("vocab_size") or 0)
    if rows < tokenizer.vocab_size:
        what = (
            f"the model has {rows:,} embedding rows, but the tokenizer's ids go up to "
            f"{tokenizer.vocab_size - 1:,}"
        )
        return Finding("vocabulary", "error", what, "set model.tokenizer to this model's tokenizer")
    beyond = sorted(stop for stop in tokenizer.stop_ids if stop >= rows)
    if beyond:
        remedy = "correct eos_token_id in generation_config.json and config.json"
        what = f"stop ids {beyond} exceed the {rows:,} embedding rows"
        return Finding("vocabulary", "error", what, remedy)
    return Finding(
        "vocabulary",
        "ok",
        f"{rows:,} embedding rows, {rows - tokenizer.vocab_size:,} of them without a token",
    )


def _template(tokenizer: Tokenizer, observed: str | None) -> Iterator[Finding]:
    names = _tokens(tokenizer)
    try:
        tokenizer.render_chat([{"role": "user", "content": "?"}])
    except DataError as error:
        remedy = (
            "base models have none; copy chat_template.jinja from the instruct model to the folder"
        )
        yield Finding("chat template", "error", str(error), remedy)
        what = f"at any of {names}; without a template, the token that ends an answer is unknown"
        yield Finding("answers end", "warning", what, remedy)
        return
    report = tokenizer.template.report()
    thinking = (
        "the prompt opens a thinking block"
        if report.opens_thinking
        else "the prompt opens no thinking block"
    )
    dropped = (
        f"; earlier thinking is dropped before {', '.join(report.drops_thinking)}"
        if report.drops_thinking
        else ""
    )
    yield Finding("chat template", "ok", f"roles {', '.join(report.roles)}; {thinking}{dropped}")
    yield _end(report, names)
    for role in ("user", "tool"):
        yield _observation(report, role, role == observed)
    if report.example_call:
        known = format_of(report.example_call)
        form = f"rollout.agent.call_format={known} parses" if known else "no call format parses"
        yield Finding(
            "tool calls", "ok" if known else "unused", f"{form} {_short(report.example_call)}"
        )
    else:
        yield Finding(
            "tool calls",
            "unused",
            "the template writes none; rollout.agent.loop=tools requires them",
        )


def _end(report: TemplateReport, names: str) -> Finding:
    end = report.ends_answer
    if end is not None and end in report.stop_tokens:
        return Finding(
            "answers end",
            "ok",
            f"with {end}, which the template also writes; generation stops at {names}",
        )
    marks = {form.before.strip() for form in report.observations.values()}
    if (
        not report.closes_answer.strip()
        and marks
        and all(mark.startswith(report.stop_tokens) for mark in marks)
    ):
        return Finding(
            "answers end", "ok", f"with the next role's header; generation stops at {names}"
        )
    if end is None and not report.closes_answer.strip():
        what = f"at {names}; the template writes nothing after an answer"
    else:
        what = f"at {names}, but the template closes an answer with {_short(report.closes_answer)}"
    remedy = (
        "set eos_token_id in generation_config.json to the token that the model was trained to end "
        "its answers with"
    )
    return Finding(
        "answers end", "warning", f"{what}: answers may run to data.max_response_length", remedy
    )


def _observation(report: TemplateReport, role: str, is_needed: bool) -> Finding:
    topic = f"{role} after an answer"
    if role in report.problems:
        remedy = "choose another rollout.agent.observation_role or another template"
        if is_needed:
            return Finding(topic, "error", report.problems[role], remedy)
        return Finding(
            topic, "warning", report.problems[role], f"needed only for multi-turn runs: {remedy}"
        )
    form = report.observations[role]
    written = {
        "raw": "unchanged",
        "trimmed": "without surrounding white space",
        "json": "as JSON",
        "other": "in another form",
    }
    needs = ", only after an answer with calls" if role == "tool" and report.needs_calls else ""
    around = f"{_short(form.before)} TEXT {_short(form.after)}"
    return Finding(topic, "ok", f"{around}, with the text {written[form.text]}{needs}")


def _tokens(tokenizer: Tokenizer) -> str:
    return ", ".join(f"{tokenizer.token_text(stop)} ({stop})" for stop in tokenizer.stop_ids)


def _short(text: str) -> str:
    shown = repr(text)[1:-1]
    return shown if len(shown) <= 90 else f"{shown[:60]} … {shown[-25:]}"
