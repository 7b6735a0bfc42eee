"""The project's tokenizer interface, which converts text and chat messages to token ids. Reads
local folders only."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from functools import cached_property, partial
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any

from hybridflow.config.outside_json import read_outside_json
from hybridflow.data.chat_template import ChatTemplate, Exchange
from hybridflow.data.chat_trial import TEXTS, render_all, trial
from hybridflow.data.plain_text import PlainText, whole_text
from hybridflow.data.tekken_files import is_tekken_folder, read_tekken
from hybridflow.data.tiktoken_files import is_tiktoken_folder, read_tiktoken
from hybridflow.errors import DataError

_NOT_A_TOKEN = "\ufffd"
# file names of vocabularies
_VOCABULARIES = ("tokenizer.json", "*.model", "vocab.*", "*.tiktoken", "tekken.json", "merges.txt")
_MOST_SETTINGS_BYTES = 8 << 20  # published ones have up to 2 MB


class Tokenizer:
    """A Hugging Face tokenizer, reduced to the interface that the trainer needs. Create it with
    `load_tokenizer`.

    Attributes:
        path: folder the tokenizer was loaded from.
        eos_id: id of the token that ends a response.
        pad_id: padding id; `eos_id` if the tokenizer defines none.
        vocab_size: one more than the largest token id, including special tokens. The model's
            embedding may be larger.
        stop_ids: sorted ids that stop generation: `eos_id`, the ids listed in config.json and
            generation_config.json, and the token that the chat template writes after an assistant
            message.
        tools: tool declarations for the chat template.
        template_kwargs: extra arguments of the chat template (`with_template`).
    """

    def __init__(self, hf_tokenizer: Any, path: Path, stop_ids: tuple[int, ...]) -> None:
        self._hf = hf_tokenizer
        self.path = path
        self.eos_id: int = hf_tokenizer.eos_token_id
        self.pad_id: int = (
            self.eos_id if hf_tokenizer.pad_token_id is None else hf_tokenizer.pad_token_id
        )
        # its `decode` skips the type checks of transformers, which take as long as the decoding
        self._backend = getattr(hf_tokenizer, "backend_tokenizer", None)
        self._known = frozenset(map(int, hf_tokenizer.get_vocab().values()))
        self.vocab_size: int = max(self._known) + 1
        self.stop_ids = stop_ids
        self.tools: Sequence[Mapping[str, Any]] = ()
        self.template_kwargs: Mapping[str, Any] = {}

    def digest(self) -> str:
        """Return a hash of the vocabulary (all ids with their tokens)."""
        entries = []
        for token, number in self._hf.get_vocab().items():
            entries.append((int(number), str(token)))
        vocabulary = sorted(entries)
        return sha256(repr(vocabulary).encode("utf-8", "surrogatepass")).hexdigest()[:16]

    def digests(self) -> dict[str, str]:
        """Return one hash of the vocabulary and one of the chat template."""
        template = repr(self._hf.chat_template).encode("utf-8", "surrogatepass")
        return {"vocabulary": self.digest(), "chat template": sha256(template).hexdigest()[:16]}

    def identity(self) -> str | None:
        """Return a hash of everything that token ids depend on, other than text and messages, or
        None if the tokenizer does not expose it."""
        if self._backend is None:
            return None
        template = repr(self._hf.chat_template)
        today = [str(date.today())] if "strftime_now" in template else []
        given = [
            self.template_kwargs,
            list(self.tools),
            self.stop_ids,
            self.eos_id,
            self._hf.special_tokens_map,
        ]
        whole = repr([self._backend.to_str(), type(self._hf).__name__, template, given, today])
        return sha256(whole.encode("utf-8", "surrogatepass")).hexdigest()

    def with_template(self, kwargs: Mapping[str, Any]) -> Tokenizer:
        """Return a copy of the tokenizer with extra arguments for the chat template.

        Raises:
            DataError: an argument is not used by the template.
        """
        unread = []
        for name in kwargs:
            if not re.search(rf"\b{re.escape(name)}\b", str(self._hf.chat_template)):
                unread.append(name)
        if unread:
            raise DataError(
                f"chat_template_kwargs.{unread[0]} is not used by the chat template of "
                f"{self.path}; correct the name or remove the key"
            )
        return self._with(template_kwargs=dict(kwargs))

    def _with(self, **values: Any) -> Tokenizer:
        made = copy.copy(self)
        # cached properties that depend on the changed values
        for found_out in ("template", "end_id"):
            made.__dict__.pop(found_out, None)
        vars(made).update(values)
        return made

    def encode(self, text: str) -> list[int]:
        """Return the token ids of the text without added special tokens.

        A special token spelled out in the text ("<|end|>") is encoded as that token. An unpaired
        surrogate becomes U+FFFD.
        """
        return self._encode(whole_text(text))

    def encode_with_places(self, text: str) -> tuple[list[int], list[int]]:
        """Return `encode(text)` and, for each token, the character offset at which it starts.

        Raises:
            DataError: the tokenizer does not report offsets.
        """
        text = whole_text(text)
        ids = list[int]()
        places = list[int]()
        backend = self._backend
        if backend is None:
            raise DataError(
                f"{self.path}: training on whole conversations requires a tokenizer.json"
            )
        for begin, part in self._parts(text):
            found = backend.encode(part, add_special_tokens=False)
            ids += found.ids
            places += [begin + place for place, _ in found.offsets]
        return ids, places

    def _parts(self, text: str) -> Iterator[tuple[int, str]]:
        """Yield (offset, part) for each part that is encoded separately."""
        begin = 0
        for part in getattr(self._hf, "parts_of", lambda text: (text,))(text):
            yield begin, part
            begin += len(part)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Render chat messages [{role, content}, ...] as a prompt. It ends where the assistant's
        answer starts or, if the last message is the assistant's, where that message continues.

        Args:
            tools: tool declarations to render; None uses the run's.

        Raises:
            DataError: the tokenizer has no chat template, or the template rejects the messages.
        """
        if messages and messages[-1].get("role") == "assistant":
            return self._render(messages, tools, continue_final_message=True)
        return self._render(messages, tools, add_generation_prompt=True)

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        **how: Any,
    ) -> str:
        if not self._hf.chat_template:
            raise DataError(
                f"{self.path}: the tokenizer has no chat template; add a chat_template.jinja to "
                "the folder"
            )
        shown = self.tools if tools is None else tools
        given: dict[str, Any] = {"tools": list(map(dict, shown))} if shown else {}
        try:
            return str(
                self._hf.apply_chat_template(
                    list(map(dict, messages)),
                    **{**self.template_kwargs, "tokenize": False, **how, **given},
                )
            )
        except Exception as error:
            # templates are programs written by the model's author and may raise anything
            raise DataError(
                f"{self.path}: the chat template rejected the messages {str(messages)[:200]}: "
                f"{error}"
            ) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        opens_answer: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Render chat messages, followed by the generation prompt if `opens_answer` is set. Raises
        the same errors as `render_chat`."""
        return self._render(messages, tools, add_generation_prompt=opens_answer)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Return the token ids of chat messages, ending where the assistant's answer starts.
        Takes the same arguments and raises the same errors as `render_chat`."""
        return self.encode(self.render_chat(messages, tools))

    @cached_property
    def template(self) -> ChatTemplate:
        """The chat template, used to continue conversations after an answer."""
        stops = list(map(self.token_text, self.stop_ids))
        return ChatTemplate(str(self.path), self.render, self._plain.added, stops)

    def continuation(self, exchanges: Sequence[Exchange], last: int | None = None) -> list[int]:
        """Return the token ids between the last answer of a conversation and the next one, as the
        chat template writes them. Earlier tokens are neither needed nor recomputed.

        Special tokens spelled out in a message are encoded as plain text, so a tool cannot
        impersonate another role.

        Args:
            exchanges: answers, each with the messages after it. Only the messages after the last
                answer are rendered.
            last: the last token of the answer. The template's own end token is added only if it
                differs.

        Raises:
            DataError: the template rejects the messages, or omits them or the answer.
        """
        ended = self.token_text(last) if last is not None and last in self.stop_ids else None
        return self._plain.encode_pieces(self.template.following(exchanges, ended))

    def cut(self, text: str, most: int) -> str:
        """Truncate the text to its first `most` tokens. Unpaired surrogates become U+FFFD."""
        return self._plain.cut(whole_text(text), most)

    @cached_property
    def end_id(self) -> int:
        """The id that ends an answer in training: the chat template's end token if generation stops
        at it, else `eos_id`."""
        end = self.template.ends_answer if self._hf.chat_template else None
        found = self.eos_id if end is None else int(self._hf.convert_tokens_to_ids(end))
        return found if found in self.stop_ids else self.eos_id

    @cached_property
    def _plain(self) -> PlainText:
        return PlainText(self._hf)

    def token_text(self, token: int) -> str:
        """Return the token as it appears in the vocabulary."""
        return str(self._hf.convert_ids_to_tokens(token))

    def decode(self, ids: Sequence[int]) -> str:
        """Decode token ids, dropping trailing stop ids and the padding after them.

        Other special tokens stay visible, and an unassigned id becomes U+FFFD, so that a response
        with stray tokens between the right characters is not mistaken for a correct one.
        """
        kept = list(map(int, ids))
        end = len(kept)
        while end and (kept[end - 1] in self.stop_ids or kept[end - 1] == self.pad_id):
            end -= 1
        # the pad token may be an ordinary token such as "0"
        while end < len(kept) and kept[end] not in self.stop_ids:
            end += 1
        del kept[end:]
        if self._known.issuperset(kept):
            return self._decode_known(kept)
        pieces: list[str] = []
        run: list[int] = []
        for token in kept:
            if token in self._known:
                run.append(token)
                continue
            pieces += [self._decode_known(run), _NOT_A_TOKEN]
            run = []
        return "".join([*pieces, self._decode_known(run)])

    def decode_response(self, ids: Sequence[int]) -> str:
        """Decode a response up to its first stop id. This is the text that a verifier should
        see."""
        stops = (position for position, token in enumerate(ids) if token in self.stop_ids)
        return self.decode(ids[: next(stops, len(ids))])

    def _encode(self, text: str) -> list[int]:
        try:
            return list(self._hf.encode(text, add_special_tokens=False))
        except BaseException as error:  # a Rust panic is not an Exception
            if isinstance(error, Exception) or type(error).__name__ == "PanicException":
                raise DataError(
                    f"{self.path}: the tokenizer failed on a text of {len(text)} characters "
                    f"({error}); a pattern or normalizer in its file is unusable"
                ) from error
            raise

    def _decode_known(self, ids: list[int]) -> str:
        if not ids:
            return ""
        if self._backend is not None:
            return str(self._backend.decode(ids, skip_special_tokens=False))
        return str(
            self._hf.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load a Hugging Face tokenizer folder. Never downloads and never runs code from the folder.

    Raises:
        DataError: the folder is missing or has no readable tokenizer, or the tokenizer has no
            end-of-sequence token.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise DataError(
            f"tokenizer folder {str(path)!r} does not exist; set model.tokenizer to a local "
            "Hugging Face folder (nothing is downloaded)"
        )
    if strange := [path.name for path in folder.iterdir() if not (path.is_file() or path.is_dir())]:
        raise DataError(
            f"{folder}: {', '.join(strange[:4])} is not a regular file; remove pipes, devices and "
            "broken links from the tokenizer's folder"
        )
    for file in _settings(folder):
        if file.stat().st_size > _MOST_SETTINGS_BYTES:
            raise DataError(
                f"{file} is larger than the limit of {_MOST_SETTINGS_BYTES} bytes for tokenizer "
                "settings; download it again"
            )
    # transformers creates an empty tokenizer from a folder that has only a model's config.json
    vocabularies = list(chain.from_iterable(map(folder.glob, _VOCABULARIES)))
    if not any(path.is_file() for path in vocabularies):
        raise DataError(
            f"{folder} has no tokenizer files (tokenizer.json, tokenizer.model, vocab.json, ...); "
            "copy the model's tokenizer files there, or set model.tokenizer to their folder"
        )
    hf = _read(folder)
    if hf.eos_token_id is None:
        raise DataError(
            f"{folder}: the tokenizer has no eos_token; set one in tokenizer_config.json"
        )
    if problem := trial([partial(hf.encode, text, add_special_tokens=False) for text in TEXTS]):
        raise DataError(f"{vocabularies[0]} is unusable: encoding a short text {problem}")
    if hf.chat_template and (
        problem := trial([partial(render_all, partial(hf.apply_chat_template, tokenize=False))])
    ):
        raise DataError(
            f"{folder}: the chat template is unusable: rendering a two-turn conversation {problem}"
        )
    found = Tokenizer(hf, folder, ())
    stops = {found.eos_id}
    for name in ("config.json", "generation_config.json"):
        stops |= _listed_stop_ids(folder / name)
    if hf.chat_template and (token := found.template.closing_token) is not None:
        stops.add(int(hf.convert_tokens_to_ids(token)))
    return found._with(stop_ids=tuple(sorted(stops)))


def _settings(folder: Path) -> Iterator[Path]:
    """Yield the non-vocabulary files that transformers reads in full without checking their
    size."""
    for name in ("tokenizer_config", "special_tokens_map", "added_tokens", "generation_config"):
        yield from folder.glob(f"{name}.json")
    yield from folder.glob("*.jinja")


def _read(folder: Path) -> Any:
    """Read the tokenizer with transformers.

    A tokenizer.json is loaded unchanged. The classes named in tokenizer_config.json for DeepSeek
    and Mixtral would override its normalizer and patterns unless the folder has a config.json with
    the right model_type.
    """
    if is_tiktoken_folder(folder):
        return read_tiktoken(folder)
    if is_tekken_folder(folder):
        return read_tekken(folder)
    try:
        if (folder / "tokenizer.json").is_file():
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
        # imported only here: it imports torch's compiler, which takes seconds
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        # OSError, ValueError, KeyError, or a bare Exception from Rust
        raise DataError(
            f"{folder}: no readable Hugging Face tokenizer ({type(error).__name__}: {error})"
        ) from error


def _listed_stop_ids(path: Path) -> set[int]:
    """Return the ids in a config's eos_token_id (an int or a list). Chat models often stop at more
    than one token."""
    if not path.is_file():
        return set()
    try:
        found = read_outside_json(path).get("eos_token_id")
    except ValueError as error:
        raise DataError(f"{path}: cannot be read ({error})") from error
    if found is None:
        return set()
    ids = found if isinstance(found, list) else [found]
    if any(type(one) is not int for one in ids):
        raise DataError(
            f"{path}: eos_token_id must be a token id or a list of token ids, got {found!r}"
        )
    return set(ids)
