"""The tokenizer as the rest of the system sees it: text and chat messages in, token ids out. Reads local folders
only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from hybridflow.config.outside_json import read_outside_json
from hybridflow.data.chat_trial import trial
from hybridflow.errors import DataError

_NOT_A_TOKEN = "\ufffd"
_MARK = "HYBRIDFLOW-MESSAGE-"
# names of the files that hold a vocabulary
_VOCABULARIES = ("tokenizer.json", "*.model", "vocab.*", "*.tiktoken", "tekken.json", "merges.txt")


class Tokenizer:
    """A Hugging Face tokenizer reduced to what the trainer needs. Made by `load_tokenizer`.

    Attributes:
        path: the folder it was read from.
        eos_id: id that ends a response.
        pad_id: padding id; `eos_id` when the tokenizer has none.
        vocab_size: number of ids with a token, special ones included. The model's embedding may be larger.
        stop_ids: sorted ids at which generation stops: `eos_id` and those of generation_config.json.
        tools: declarations of tools that chat templates show the model.
    """

    def __init__(self, hf_tokenizer: Any, path: Path, stop_ids: tuple[int, ...]) -> None:
        self._hf = hf_tokenizer
        self.path = path
        self.eos_id: int = hf_tokenizer.eos_token_id
        self.pad_id: int = self.eos_id if hf_tokenizer.pad_token_id is None else hf_tokenizer.pad_token_id
        self.vocab_size: int = len(hf_tokenizer)
        self.stop_ids = stop_ids
        self.tools: Sequence[Mapping[str, Any]] = ()

    def digest(self) -> str:
        """A hash of the vocabulary: which token each id stands for."""
        vocabulary = sorted((int(number), str(token)) for token, number in self._hf.get_vocab().items())
        return sha256(repr(vocabulary).encode("utf-8", "surrogatepass")).hexdigest()[:16]

    def digests(self) -> dict[str, str]:
        """Hashes of the vocabulary and of the chat template."""
        template = repr(self._hf.chat_template).encode("utf-8", "surrogatepass")
        return {"vocabulary": self.digest(), "chat template": sha256(template).hexdigest()[:16]}

    def encode(self, text: str) -> list[int]:
        """Token ids of the text, with no special token added. A special token written out in the text ("<|end|>")
        becomes that token."""
        return list(self._hf.encode(text, add_special_tokens=False))

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> str:
        """The prompt text of chat messages [{role, content}, ...], ending where the assistant's answer starts.

        Args:
            tools: declarations to show; None: those of the run.

        Raises:
            DataError: the tokenizer has no chat template, or the template refuses the messages.
        """
        if not self._hf.chat_template:
            raise DataError(f"{self.path}: the tokenizer has no chat template; add a chat_template.jinja to the folder")
        shown = self.tools if tools is None else tools
        given: dict[str, Any] = {"tools": [dict(one) for one in shown]} if shown else {}
        try:
            return str(
                self._hf.apply_chat_template(
                    [dict(m) for m in messages], tokenize=False, add_generation_prompt=True, **given
                )
            )
        except Exception as error:  # templates are programs of the model's author and raise what they like
            raise DataError(
                f"{self.path}: the chat template refused the messages {str(messages)[:200]}: {error}"
            ) from error

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """Token ids of chat messages, ending where the assistant's answer starts. Arguments and errors are those of
        `render_chat`."""
        return self.encode(self.render_chat(messages, tools))

    def continuation(self, role: str, texts: Sequence[str], most: int) -> list[int]:
        """Token ids between an answer, which ended with a stop id, and the next one: the messages of `role` with these
        texts, as the chat template puts them there. What was said before is not needed and not made again.

        Special tokens that are written out in a text stay text, so that a tool cannot speak for another role.

        Args:
            most: tokens that are kept of each text.

        Raises:
            DataError: the template refuses such messages, or leaves them or the answer out.
        """
        kept = [self._hf.encode(text, add_special_tokens=False, split_special_tokens=True)[:most] for text in texts]
        marks = [f"{_MARK}{number}." for number in range(len(kept) + 1)]
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": marks[0]}]
        rest = self.render_chat([*messages, *({"role": role, "content": mark} for mark in marks[1:])])
        between: list[list[int]] = []
        for mark in marks:
            before, found, rest = rest.partition(mark)
            if not found or mark in rest:
                raise DataError(
                    f"{self.path}: the chat template does not show an answer and the message of role {role} after it "
                    "once each, in order; set rollout.agent.observation_role to the other role, or give a template "
                    "that leaves what was said as it is"
                )
            between.append(self.encode(before))
        ids = [token for shown, text in zip(between[1:], kept, strict=True) for token in (*shown, *text)]
        ids += self.encode(rest)
        return ids[1:] if ids and ids[0] in self.stop_ids else ids  # the answer has ended with that token itself

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids; stop and pad ids at the end are left out.

        Special tokens elsewhere stay visible and an id without a token becomes U+FFFD, so that a response with rubbish
        between the right characters does not read like a right one.
        """
        kept = [int(i) for i in ids]
        while kept and (kept[-1] in self.stop_ids or kept[-1] == self.pad_id):
            kept.pop()
        pieces: list[str] = []
        run: list[int] = []
        for token in kept:
            if 0 <= token < self.vocab_size:
                run.append(token)
                continue
            pieces += [self._decode_known(run), _NOT_A_TOKEN]
            run = []
        return "".join([*pieces, self._decode_known(run)])

    def decode_response(self, ids: Sequence[int]) -> str:
        """The text of a response up to its first stop id: what a verifier should see."""
        end = next((position for position, token in enumerate(ids) if int(token) in self.stop_ids), len(ids))
        return self.decode(ids[:end])

    def _decode_known(self, ids: list[int]) -> str:
        return str(self._hf.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)) if ids else ""


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Reads a Hugging Face tokenizer folder. Never downloads and never runs code from the folder.

    Raises:
        DataError: the folder is missing, holds no tokenizer or none that can be read, or the tokenizer has no
            end-of-sequence token.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise DataError(
            f"tokenizer folder {str(path)!r} does not exist; give a local Hugging Face folder in model.tokenizer "
            "(nothing is downloaded)"
        )
    if strange := [path.name for path in folder.iterdir() if not (path.is_file() or path.is_dir())]:
        raise DataError(
            f"{folder}: {', '.join(strange[:4])} is no regular file; a pipe, a device or a broken link "
            "has no place in a tokenizer's folder"
        )
    # transformers makes an empty tokenizer of a folder that has none but a model's config.json
    if not any(path.is_file() for pattern in _VOCABULARIES for path in folder.glob(pattern)):
        raise DataError(
            f"{folder} holds no tokenizer files (tokenizer.json, tokenizer.model, vocab.json, ...); copy the model's "
            "there, or give their folder in model.tokenizer"
        )
    from transformers import AutoTokenizer

    try:
        hf = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # OSError, ValueError, KeyError, or the bare Exception of the Rust side
        raise DataError(f"{folder}: no readable Hugging Face tokenizer ({type(error).__name__}: {error})") from error
    if hf.eos_token_id is None:
        raise DataError(f"{folder}: the tokenizer has no eos_token; set one in tokenizer_config.json")
    if hf.chat_template and (problem := trial(partial(hf.apply_chat_template, tokenize=False))):
        raise DataError(f"{folder}: the chat template is not fit for use: {problem}")
    return Tokenizer(hf, folder, tuple(sorted({int(hf.eos_token_id), *_generation_stop_ids(folder)})))


def _generation_stop_ids(folder: Path) -> list[int]:
    """The eos_token_id of generation_config.json (an int or a list): chat models often stop at more than one token."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return []
    try:
        found = read_outside_json(path).get("eos_token_id")
        ids = [] if found is None else found if isinstance(found, list) else [found]
        return [int(i) for i in ids]
    except (ValueError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: cannot read eos_token_id ({error})") from error
