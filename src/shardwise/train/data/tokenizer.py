"""Tokenizers: ``bytes``, a ``tokenizer.json``, or a transformers folder; with the chat template that goes with each."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.errors import DataError
from shardwise.train.data.chat import CHATML, ChatTemplate, check_template
from shardwise.train.data.paths import place_of
from shardwise.train.data.sources import first_line, need

_END_OF_TEXT = ["</s>", "<|endoftext|>", "<|end_of_text|>", "<|end|>", "<eos>", "[EOS]", "<|im_end|>", "[SEP]"]
_TEMPLATE = "chat_template.jinja"
TOKENIZER_NAMES = ("tokenizer", "special_tokens", "added_tokens", "vocab", "merges", "spiece", "sentencepiece", "chat")
"""Beginnings of the names of a tokenizer's files."""
Offsets = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Tokenizer:
    """Text to ids of tokens.

    ``separator`` is the id of ``end``, the token that ends a document; ``encode`` gives the ids of each text, and
    ``encode_with_offsets`` also the characters that each token stands for; ``decode`` gives the text of ids, special
    tokens included. ``name`` is the value of the config. ``begin`` is the token that transformers puts before a text,
    and nothing does here; empty if none.
    """

    name: str
    vocab_size: int
    separator: int
    end: str
    encode: Callable[[list[str]], Iterable[Any]]
    encode_with_offsets: Callable[[list[str]], Iterable[tuple[Any, Offsets]]]
    decode: Callable[[NDArray[Any]], str]
    begin: str = ""

    def template(self, given: str | None) -> ChatTemplate:
        """Return the template ``given`` in the config (a name, or a file), or else the tokenizer's own.

        Raises:
            DataError: there is none, or it is not Jinja.
        """
        return _template(self.name, given, self.end)


def tokenizer_files(name: str) -> list[Path]:
    """List the files that determine a tokenizer's behaviour; none for ``bytes``.

    Raises:
        DataError: there are none.
    """
    if name == "bytes":
        return []
    path = place_of(name, f"data.tokenizer '{name}'")
    kinds = ("json", "txt", "model", "jinja")
    files = [path] if path.is_file() else sorted(f for kind in kinds for f in path.glob(f"*.{kind}"))
    if path.is_dir() and not any(f.suffix == ".model" or f.name.startswith(TOKENIZER_NAMES[:-1]) for f in files):
        files = []  # a model's folder has other files of these kinds
    if not files:
        what = "has no tokenizer file" if path.is_dir() else "does not exist here"
        raise DataError(f"data.tokenizer '{name}' {what}; give 'bytes', a tokenizer.json or a folder with one")
    return files


def load_tokenizer(name: str) -> Tokenizer:
    """Load ``bytes``, a ``tokenizer.json`` (without truncation and padding) or a folder.

    Raises:
        DataError: it is not there, cannot be read, or has no token that ends a document.
    """
    if name == "bytes":
        return Tokenizer(
            name,
            257,
            256,
            "",
            lambda texts: (np.frombuffer(utf8(text), np.uint8) for text in texts),
            _byte_offsets,
            lambda ids: bytes(ids[ids < 256].astype(np.uint8)).decode("utf-8", errors="replace"),
        )
    tokenizer_files(name)
    path = Path(name).expanduser()
    file = path / "tokenizer.json" if path.is_dir() else path
    library = need("tokenizers" if file.is_file() else "transformers")
    end: Any = None
    begin = ""
    try:
        if file.is_file():
            fast = library.Tokenizer.from_file(str(file))
            fast.no_truncation()
            fast.no_padding()
            begin = _put_before(fast)
            fast.post_processor = None  # it adds special tokens, and may leave white space out of offsets
            vocab = fast.get_vocab(with_added_tokens=True)
            end = _settings(path).get("eos_token")
        else:
            slow = library.AutoTokenizer.from_pretrained(str(path), local_files_only=True)
            vocab, end = slow.get_vocab(), slow.eos_token
    except Exception as error:  # tokenizers raises bare Exception
        raise DataError(f"data.tokenizer '{name}' cannot be read: {first_line(error)}; give another") from None
    end = end.get("content") if isinstance(end, dict) else end
    end = next((word for word in [end, *_END_OF_TEXT] if word in vocab), None)
    if end is None:
        known = ", ".join(_END_OF_TEXT)
        raise DataError(f"data.tokenizer '{name}' has no token that ends a document; add one of these: {known}")

    def encode(texts: list[str]) -> Iterable[Any]:
        if file.is_file():
            return (coded.ids for coded in fast.encode_batch(_whole(texts), add_special_tokens=False))
        return slow(_whole(texts), add_special_tokens=False, verbose=False)["input_ids"]

    def encode_with_offsets(texts: list[str]) -> Iterable[tuple[Any, Offsets]]:
        if not file.is_file():
            raise DataError(
                f"data.tokenizer '{name}' does not tell which characters a token stands for, so no part of a "
                "conversation can be left out of the loss; convert it to a tokenizer.json (a fast tokenizer)"
            )
        return ((coded.ids, coded.offsets) for coded in fast.encode_batch(_whole(texts), add_special_tokens=False))

    def decode(ids: NDArray[Any]) -> str:
        if file.is_file():
            return str(fast.decode(ids.tolist(), skip_special_tokens=False))
        return str(slow.decode(ids.tolist()))

    return Tokenizer(name, max(vocab.values()) + 1, vocab[end], end, encode, encode_with_offsets, decode, begin)


def _put_before(fast: Any) -> str:
    """Return the special token that a tokenizer's post-processor puts before a text, as ``<s>``; empty if none."""
    try:
        coded, plain = fast.encode("a").ids, fast.encode("a", add_special_tokens=False).ids
    except Exception:  # tokenizers raises bare Exception for a letter that is in no vocabulary
        return ""
    return str(fast.id_to_token(coded[0])) if coded[:1] != plain[:1] else ""


def _byte_offsets(texts: list[str]) -> Iterable[tuple[Any, Offsets]]:
    """Yield the bytes of each text, and the one character that each belongs to."""
    for text in texts:
        data = np.frombuffer(utf8(text), np.uint8)
        at = np.cumsum((data & 0xC0) != 0x80) - 1  # continuation bytes belong to the character that began
        yield data, [(begin, begin + 1) for begin in at.tolist()]


def template_file(name: str, given: str | None) -> Path | None:
    """Return the file of a chat template; ``None`` where it is a built-in one, or part of another file.

    Raises:
        DataError: a given file does not exist.
    """
    if given == "chatml":
        return None
    if given is not None:
        path = place_of(given, f"data.chat_template '{given}'")
        if not path.is_file():
            raise DataError(
                f"data.chat_template '{given}' does not exist; give 'chatml', or a file with a Jinja template"
            )
        return path
    path = Path(name).expanduser() / _TEMPLATE
    return path if name != "bytes" and path.is_file() else None


def _template(name: str, given: str | None, end: str) -> ChatTemplate:
    file, special = template_file(name, given), dict[str, str]()
    where = f"data.chat_template '{given}'" if given is not None else f"the chat template of data.tokenizer '{name}'"
    folder = None if name == "bytes" else Path(name).expanduser()
    settings = {} if folder is None else _settings(folder)
    own: Any = settings.get("chat_template")
    if isinstance(own, list):  # named templates
        named = {one.get("name"): one.get("template") for one in own if isinstance(one, dict)}
        own = named.get("default") or next(iter(named.values()), None)
    text = CHATML if given == "chatml" else file.read_text(encoding="utf-8") if file is not None else own
    if not isinstance(text, str):
        raise DataError(
            f"data.tokenizer '{name}' has no chat template, and the rows are conversations; "
            "set data.chat_template to 'chatml' or to a file with the template of the model"
        )
    check_template(text, where)
    if name == "bytes" and "eos_token" in text:
        raise DataError(
            f"{where} ends turns with eos_token, which data.tokenizer 'bytes' has no text for, so no turn would end; "
            "use 'chatml', or a tokenizer with such a token"
        )
    for key, value in settings.items():
        if key.endswith("_token") and value is not None:
            special[key] = value.get("content", "") if isinstance(value, dict) else str(value)
    special.setdefault("eos_token", end)
    special.setdefault("bos_token", "")
    ends = (end, special["eos_token"], *_added(folder, settings), "<|im_end|>")
    return ChatTemplate(text, special, tuple(dict.fromkeys(word for word in ends if word)))


def _settings(folder: Path) -> dict[str, Any]:
    """Return a folder's settings of its tokenizer; older ones keep the special tokens in a file of their own."""
    found: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            found |= json.loads((folder / name).read_text(encoding="utf-8"))
    return found


def _added(folder: Path | None, settings: dict[str, Any]) -> list[str]:
    """Return the contents of a tokenizer's special tokens."""
    known = list(settings.get("added_tokens_decoder", {}).values())
    if folder is not None and not known:
        file = folder / "tokenizer.json" if folder.is_dir() else folder
        if file.is_file():
            known = json.loads(file.read_text(encoding="utf-8")).get("added_tokens", [])
    return [one["content"] for one in known if isinstance(one, dict) and one.get("special") and one.get("content")]


def _whole(texts: list[str]) -> list[str]:
    """Replace halves of surrogate pairs, which tokenizers refuse, by one character each."""
    return [text if text.isascii() else utf8(text).decode() for text in texts]


def utf8(text: str) -> bytes:
    """Return a text's bytes; halves of surrogate pairs are replaced."""
    return text.encode("utf-8", errors="replace")


def save_tokenizer(name: str, given: str | None, folder: Path) -> None:
    """Write the tokenizer and its chat template as transformers loads them.

    ``bytes`` becomes an equal tokenizer of the ``tokenizers`` library: the id of a byte is its value, 256 the end.

    Raises:
        DataError: the chat template does not exist.
    """
    from transformers import PreTrainedTokenizerFast

    source = Path(name).expanduser()
    if name == "bytes":
        PreTrainedTokenizerFast(tokenizer_object=_byte_tokenizer(), eos_token=_END_OF_TEXT[1]).save_pretrained(folder)
    elif source.is_dir():
        for file in tokenizer_files(name):
            if file.name.startswith(TOKENIZER_NAMES):
                shutil.copyfile(file, folder / file.name)
    else:
        end = load_tokenizer(name).end
        PreTrainedTokenizerFast(tokenizer_file=str(source), eos_token=end).save_pretrained(folder)
    if given is not None:
        found = template_file(name, given)
        text = CHATML if found is None else found.read_text(encoding="utf-8")
        (folder / _TEMPLATE).write_text(text, encoding="utf-8")


def _byte_tokenizer() -> Any:
    """Return a tokenizer without merges whose ids are the values of bytes."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as FastTokenizer

    # GPT-2's letters for bytes: printable Latin-1 stands for itself, the others for letters from 256 on
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in plain}
    letters |= {byte: chr(256 + i) for i, byte in enumerate(byte for byte in range(256) if byte not in letters)}
    made = FastTokenizer(models.BPE(vocab={letter: byte for byte, letter in letters.items()}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(_END_OF_TEXT[1], special=True)])
    return made
