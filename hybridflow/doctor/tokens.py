"""What a folder's tokenizer and chat template do with a conversation, and whether the model's
vocabulary holds them."""

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
    """Tokenizer, vocabulary, ends of answers, and the template's turns.

    Args:
        observed: the role of messages that a recipe puts after answers; None where an answer is the
            end.
    """
    try:
        tokenizer = load_tokenizer(folder)
    except DataError as error:
        yield Finding(
            "tokenizer",
            "error",
            str(error),
            "a folder whose tokenizer is whole: model.tokenizer=FOLDER",
        )
        return
    ids = tokenizer.encode(_SAMPLE)
    if tokenizer.decode(ids) != _SAMPLE:
        what = f"{_SAMPLE!r} becomes {tokenizer.decode(ids)!r}"
        yield Finding(
            "tokenizer",
            "warning",
            what,
            "answers will be read so; compare with the model's own examples",
        )
    else:
        what = (
            f"{tokenizer.vocab_size:,} tokens; {len(_SAMPLE)} characters of text and code become "
            f"{len(ids)}, and back"
        )
        yield Finding("tokenizer", "ok", what)
    yield _vocabulary(tokenizer, hf)
    yield from _template(tokenizer, observed)


def _vocabulary(tokenizer: Tokenizer, hf: Mapping[str, Any]) -> Finding:
    rows = int(hf.get("vocab_size") or 0)
    if rows < tokenizer.vocab_size:
        what = (
            f"the model has {rows:,} rows of embeddings, and the tokenizer ids up to "
            f"{tokenizer.vocab_size - 1:,}"
        )
        return Finding(
            "vocabulary", "error", what, "the tokenizer of this model: model.tokenizer=FOLDER"
        )
    beyond = sorted(stop for stop in tokenizer.stop_ids if stop >= rows)
    if beyond:
        remedy = "correct eos_token_id in generation_config.json and config.json"
        return Finding("vocabulary", "error", f"answers end at {beyond}, of {rows:,} ids", remedy)
    return Finding(
        "vocabulary",
        "ok",
        f"{rows:,} rows of embeddings, {rows - tokenizer.vocab_size:,} without a token",
    )


def _template(tokenizer: Tokenizer, observed: str | None) -> Iterator[Finding]:
    names = _tokens(tokenizer)
    try:
        tokenizer.render_chat([{"role": "user", "content": "?"}])
    except DataError as error:
        remedy = (
            "a base model has none: put chat_template.jinja of its instruct model into the folder"
        )
        yield Finding("chat template", "error", str(error), remedy)
        yield Finding("answers end", "warning", f"at {names}; no template says at which", remedy)
        return
    report = tokenizer.template.report()
    thinking = (
        "the prompt opens a thinking" if report.opens_thinking else "the prompt opens no thinking"
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
        form = f"rollout.agent.call_format={known} reads" if known else "no call format here reads"
        yield Finding(
            "tool calls", "ok" if known else "unused", f"{form} {_short(report.example_call)}"
        )
    else:
        yield Finding(
            "tool calls", "unused", "the template writes none; rollout.agent.loop=tools needs them"
        )


def _end(report: TemplateReport, names: str) -> Finding:
    end = report.ends_answer
    if end is not None and end in report.stop_tokens:
        return Finding(
            "answers end",
            "ok",
            f"with {end}, as the template writes it; generation stops at {names}",
        )
    marks = {form.before.strip() for form in report.observations.values()}
    if (
        not report.closes_answer.strip()
        and marks
        and all(mark.startswith(report.stop_tokens) for mark in marks)
    ):
        return Finding(
            "answers end", "ok", f"with the mark of the next role; generation stops at {names}"
        )
    if end is None and not report.closes_answer.strip():
        what = f"at {names}; the template writes nothing after an answer"
    else:
        what = f"at {names}, and the template closes an answer with {_short(report.closes_answer)}"
    remedy = (
        "name the token that the model was trained to end with in eos_token_id of "
        "generation_config.json"
    )
    return Finding(
        "answers end", "warning", f"{what}: answers may run to data.max_response_length", remedy
    )


def _observation(report: TemplateReport, role: str, is_needed: bool) -> Finding:
    topic = f"{role} after an answer"
    if role in report.problems:
        remedy = "another rollout.agent.observation_role, or another template"
        if is_needed:
            return Finding(topic, "error", report.problems[role], remedy)
        return Finding(
            topic, "warning", report.problems[role], f"only runs of several turns need it: {remedy}"
        )
    form = report.observations[role]
    written = {
        "raw": "as it is",
        "trimmed": "without white space around it",
        "json": "as JSON",
        "other": "in its way",
    }
    needs = ", after an answer with calls alone" if role == "tool" and report.needs_calls else ""
    around = f"{_short(form.before)} TEXT {_short(form.after)}"
    return Finding(topic, "ok", f"{around}, the text {written[form.text]}{needs}")


def _tokens(tokenizer: Tokenizer) -> str:
    return ", ".join(f"{tokenizer.token_text(stop)} ({stop})" for stop in tokenizer.stop_ids)


def _short(text: str) -> str:
    shown = repr(text)[1:-1]
    return shown if len(shown) <= 90 else f"{shown[:60]} … {shown[-25:]}"
