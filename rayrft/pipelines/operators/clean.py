"""Operators that clean texts and leave out rows with which nothing can be done."""

from __future__ import annotations

import html.entities
import ipaddress
import re
import unicodedata
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, ClassVar, Literal, TypeVar, get_args

import pyarrow as pa
from pydantic import Field

from rayrft.config.base import Section, invalid, section_rule
from rayrft.errors import ConfigError, nearest
from rayrft.pipelines.operator import (
    AnyColumn,
    Applied,
    Kind,
    O,
    Operator,
    TextColumn,
    TextColumns,
    is_list,
    is_text,
    register_operator,
    with_column_values,
)
from rayrft.pipelines.rows import FORMULA, texts


class Columns(Section):
    columns: TextColumns = Field(("question", "answer"), min_length=1)


class OneColumn(Section):
    column: TextColumn = "answer"


C = TypeVar("C", bound=Columns)


class TextCleaner(Operator[C]):
    """An operator that changes texts of columns one by one: a subclass implements `change` instead of `apply`."""

    kind = "clean"

    def apply(self, rows: pa.RecordBatch) -> Applied:
        for name in self.options.columns:
            changed = [None if text is None else self.change(text) for text in rows.column(name).to_pylist()]
            rows = with_column_values(rows, name, changed)
        return Applied(rows)

    def change(self, text: str) -> str:
        """Return the text that takes the place of this one."""
        raise NotImplementedError


class RowFilter(Operator[O]):
    """An operator that leaves out rows by a value of each: a subclass implements `reason`, and `values` unless that is
    the text of a column."""

    kind: ClassVar[Kind] = "filter"

    def apply(self, rows: pa.RecordBatch) -> Applied:
        return Applied(rows, [self.reason(value) for value in self.values(rows)])

    def values(self, rows: pa.RecordBatch) -> Iterable[Any]:
        """Return the value of each row."""
        return texts(rows, self.options.column)  # type: ignore[attr-defined]

    def reason(self, value: Any) -> str | None:
        """Return why a row with this value is left out; None if it stays."""
        raise NotImplementedError


class NormaliseOptions(Columns):
    form: Literal["NFC", "NFKC"] = "NFC"
    """NFKC also replaces full-width letters, ligatures and superscripts: x² becomes x2."""


_INVISIBLE = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # colours and the like of a terminal
    "|[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u0084\u0086-\u009f\u00ad\u200b\u202a-\u202e\u2060-\u2064\u2066-\u2069\ufeff"
    "\U000e0000-\U000e007f]"
)
_SPACES = re.compile("[\t\u00a0\u1680\u2000-\u200a\u202f\u205f]")
_LINES = re.compile("\r\n|[\r\u0085\u2028\u2029]")
_TRAILING = re.compile(r"(?<! ) +(?=\n|$)")
_ODD = re.compile(r"[^\n -~]| \n|\n\n\n|\A\n|[ \n]\Z")
"""Every text that one of these patterns changes has a match."""
_BLANK_LINES = re.compile(r"\n{3,}")


@register_operator("normalise")
class Normalise(TextCleaner[NormaliseOptions]):
    """Normalise Unicode and white space: one form of each character, no control, invisible or bidirectional characters,
    no tags, no escapes of terminals. Spaces and line ends are plain, with none at the ends of lines or text, and at
    most one blank line. Indents and spaces within lines stay."""

    def change(self, text: str) -> str:
        if not _ODD.search(text):
            return text
        text = unicodedata.normalize(self.options.form, _INVISIBLE.sub("", _LINES.sub("\n", text)))
        text = _SPACES.sub(lambda found: "    " if found[0] == "\t" else " ", text)
        return _BLANK_LINES.sub("\n\n", _TRAILING.sub("", text)).strip("\n").rstrip()


_TAGS = (
    "a|abbr|article|aside|b|big|blockquote|body|br|button|caption|center|cite|code|col|dd|del|div|dl|dt|em|"
    "figure|font|footer|form|h1|h2|h3|h4|h5|h6|head|header|hr|html|i|iframe|img|input|ins|kbd|label|li|link|"
    "main|meta|nav|ol|option|p|pre|q|s|samp|script|section|select|small|span|strike|strong|style|sub|sup|"
    "table|tbody|td|textarea|tfoot|th|thead|title|tr|tt|u|ul|var"
)
_BOOLEAN = "async|checked|controls|defer|disabled|hidden|multiple|nowrap|readonly|required|selected"
_DROPPED = {
    "script": re.compile(r"</script\s*>", re.IGNORECASE),
    "style": re.compile(r"</style\s*>", re.IGNORECASE),
    "!--": re.compile("-->"),
}
"""The end of each element that is dropped as a whole, by its beginning."""
_DROPPED_FROM = re.compile(r"<(?:(script|style)\b[^<>]*>|!--)", re.IGNORECASE)
_BREAK = re.compile(r"<(?:br\s*(?:/\s*)?|/(?:p|div|li|tr|h[1-6]|blockquote|table|ul|ol|section)\s*)>", re.IGNORECASE)
_ENTITY = re.compile(r"&(?:#\d+|#[xX][0-9a-fA-F]+|(\w+));")
_TAG = re.compile(
    rf"</?(?:{_TAGS})(?:\s+(?:{_BOOLEAN}|[\w:-]+\s*=\s*(?:\"[^\"]*\"|'[^']*'|[^\s<>\"']+)))*\s*/?>", re.IGNORECASE
)


@register_operator("strip_markup")
class StripMarkup(TextCleaner[Columns]):
    """Remove HTML: tags of HTML by name, scripts, styles and comments; entities become their characters. Other signs
    stay, such as a < b and c > d, <think>, or List<int>."""

    def change(self, text: str) -> str:
        if "<" in text:
            text = _TAG.sub("", _BREAK.sub("\n", _without_dropped(text)))
        return _ENTITY.sub(_character, text) if "&" in text else text


def _without_dropped(text: str) -> str:
    parts, kept, at = list[str](), 0, 0
    unclosed = set[str]()
    while found := _DROPPED_FROM.search(text, at):
        kind = (found[1] or "!--").lower()
        end = None if kind in unclosed else _DROPPED[kind].search(text, found.end())
        if end is None:  # nor is there one further on
            unclosed.add(kind)
            at = found.end()
        else:
            parts.append(text[kept : found.start()])
            kept = at = end.end()
    return "".join([*parts, text[kept:]])


def _character(entity: re.Match[str]) -> str:
    """Return the character of an entity of HTML. `html.unescape` alone would also replace the &deg of &degree;."""
    known = entity[1] is None or f"{entity[1]};" in html.entities.html5
    return html.unescape(entity[0]) if known else entity[0]


_MOJIBAKE = re.compile("[\ufffd]|(?:Ã[\u0080-\u00bf]|â€.|Â[\u00a0-\u00bf])")


class BrokenOptions(Columns):
    max_garbled: float = Field(0.01, ge=0, le=1)
    """Largest share of characters that may be replacement characters, or UTF-8 that was read as Latin-1."""


@register_operator("drop_broken")
class DropBroken(RowFilter[BrokenOptions]):
    """Leave out rows of which a column is missing or blank, or garbled."""

    kind = "clean"

    def values(self, rows: pa.RecordBatch) -> list[dict[str, str | None]]:
        return rows.select(list(self.options.columns)).to_pylist()

    def reason(self, value: dict[str, str | None]) -> str | None:
        for name, text in value.items():
            if text is None or not text.strip():
                return f"no {name}"
            if not text.isascii() and len(_MOJIBAKE.findall(text)) > self.options.max_garbled * len(text):
                return f"garbled {name}"
        return None


class LengthOptions(Section):
    column: AnyColumn = "question"
    """A text, or a list, such as token_ids of experiences."""
    min_tokens: int = Field(1, ge=0)
    max_tokens: int | None = Field(None, ge=1)
    tokenizer: str | None = None
    """A folder or hub id; by default the model's, in a run and with ``--config``."""


@register_operator("length")
class Length(RowFilter[LengthOptions]):
    """Leave out rows with fewer or more tokens in a column than the bounds."""

    kind = "clean"

    def check(self, schema: pa.Schema) -> None:
        kind = schema.field(self.options.column).type
        if is_list(kind):
            return
        if not is_text(kind):
            raise ConfigError("holds neither texts nor lists", field="column", value=self.options.column)
        if self._path is None:
            raise ConfigError("is needed to count tokens", "give a folder or a hub id", field="tokenizer")

    def prepare(self) -> None:
        if self._path is not None:
            from transformers import AutoTokenizer

            self._tokenizer = AutoTokenizer.from_pretrained(self._path)

    def values(self, rows: pa.RecordBatch) -> list[int]:
        column = rows.column(self.options.column)
        if is_list(column.type):
            return [len(each or ()) for each in column.to_pylist()]
        found = self._tokenizer(texts(rows, self.options.column), add_special_tokens=False)
        return list(map(len, found["input_ids"]))

    @property
    def _path(self) -> str | None:
        return self.options.tokenizer or self.context.tokenizer

    def reason(self, value: int) -> str | None:
        if value < self.options.min_tokens:
            return f"too short: {value} tokens"
        most = self.options.max_tokens
        return f"too long: {value} tokens" if most is not None and value > most else None


class LanguageOptions(OneColumn):
    column: TextColumn = "question"
    keep: tuple[str, ...] = Field(("en",), min_length=1)
    """ISO 639-1 codes."""
    among: tuple[str, ...] = ("en", "zh", "es", "fr", "de", "ru", "ja", "ko", "pt", "it", "ar", "hi")
    """The languages to distinguish: fewer are faster and surer."""
    min_confidence: float = Field(0.5, ge=0, le=1)
    """A text is left out if its most probable language differs, with at least this probability."""
    min_letters: int = Field(20, ge=1)
    """Shorter texts stay."""

    @section_rule
    def _known(self) -> None:
        if len(set(self.keep) | set(self.among)) < 2:
            raise invalid("among", "one language cannot be distinguished", remedy="name those that may come up")


_FORMULA = re.compile(rf"{FORMULA}|[^\W\d_]?\d\w*", re.DOTALL)


@register_operator("language")
class Language(RowFilter[LanguageOptions]):
    """Leave out texts in other languages, which lingua detects by their letters outside formulas.

    Needs the extra ``data`` of rayrft.
    """

    kind = "clean"

    def __init__(self, options: LanguageOptions, context: Any) -> None:
        super().__init__(options, context)
        try:
            from lingua import Language as Known
        except ImportError:
            remedy = "install rayrft[data], which brings lingua-language-detector"
            raise ConfigError("needs a library that is not installed", remedy, field="name") from None
        known = {each.iso_code_639_1.name.lower(): each for each in Known.all()}
        for key in ("keep", "among"):
            for code in getattr(options, key):
                if code not in known:
                    raise ConfigError("unknown language", nearest(code, known), field=key, value=code)
        self._languages = [known[code] for code in sorted({*options.keep, *options.among})]

    def prepare(self) -> None:
        from lingua import LanguageDetectorBuilder

        self._detector = LanguageDetectorBuilder.from_languages(*self._languages).build()

    def reason(self, value: str) -> str | None:
        text = _FORMULA.sub(" ", value)
        if sum(map(str.isalpha, text)) < self.options.min_letters:
            return None
        likely = self._detector.compute_language_confidence_values(text)[0]
        code = likely.language.iso_code_639_1.name.lower()
        kept = code in self.options.keep or likely.value < self.options.min_confidence
        return None if kept else f"language {code}"


PersonalKind = Literal["email", "phone", "card", "iban", "ip", "ssn"]


class PersonalOptions(Columns):
    kinds: tuple[PersonalKind, ...] = get_args(PersonalKind)


_PERSONAL: dict[str, re.Pattern[str]] = {
    "email": re.compile(r"(?<![\w.+-])[\w.+-]+@(?:[A-Za-z0-9-]+\.)+[A-Za-z]{2,}(?![\w-])"),
    "iban": re.compile(r"\b[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,3})?\b"),
    "card": re.compile(
        r"(?<![\d.,*/+=-])(?:[3-6]\d{12,18}|[3-6]\d{3}([ -])\d{4}\1\d{4}\1\d{1,7}|3\d{3}[ -]\d{6}[ -]\d{5})"
        r"(?![\d*/+=-]|[.,]\d)"
    ),
    "ssn": re.compile(r"(?<![\d-])\d{3}-\d{2}-\d{4}(?![\d-])"),
    "ip": re.compile(
        r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?!\.?\d)|(?<![\w:])(?:[0-9A-Fa-f]{1,4}:){7}[0-9A-Fa-f]{1,4}(?![\w:])"
    ),
    "phone": re.compile(
        r"(?<![\w+.,-])(?:\+\d{1,3}[ .-]?(?:\(\d{1,4}\)[ .-]?)?\d{2,4}(?:[ .-]?\d{2,4}){1,3}"
        r"|\(\d{3}\) ?\d{3}[ .-]\d{4}|\d{3}[.-]\d{3}[.-]\d{4})(?![\w-]|[.,]\d)"
    ),
}


_LONG_NUMBER = re.compile(r"\d[\d ().-]{5,}\d")
"""Without one, a text has no number of a telephone, card or social security."""


def _luhn(text: str) -> bool:
    digits = [int(digit) for digit in text if digit.isdigit()][::-1]
    doubled = [sum(divmod(2 * digit, 10)) for digit in digits[1::2]]
    return len(set(digits)) > 1 and (sum(digits[::2]) + sum(doubled)) % 10 == 0


def _iban(text: str) -> bool:
    plain = text.replace(" ", "")
    return int("".join(str(int(sign, 36)) for sign in plain[4:] + plain[:4])) % 97 == 1


def _address(text: str) -> bool:
    try:
        return bool(ipaddress.ip_address(text))
    except ValueError:
        return False


_VALID: dict[str, Callable[[str], bool]] = {
    "card": _luhn,
    "iban": _iban,
    "ip": _address,
    "ssn": lambda text: text[:3] not in ("000", "666") and text[0] != "9",
}


@register_operator("mask_personal")
class MaskPersonal(TextCleaner[PersonalOptions]):
    """Replace addresses of mail and of the Internet, numbers of telephones, cards (with a valid checksum), accounts
    (IBAN, likewise) and US social security by their kind in brackets: [email]. Names of people stay."""

    def change(self, text: str) -> str:
        possible = {"email": "@" in text, "iban": True, "ip": text.count(".") > 2 or text.count(":") > 6}
        numbers = _LONG_NUMBER.search(text) is not None
        for kind in (each for each in _PERSONAL if each in self.options.kinds and possible.get(each, numbers)):
            text = _PERSONAL[kind].sub(partial(_masked, kind), text)
        return text


def _masked(kind: str, found: re.Match[str]) -> str:
    return f"[{kind}]" if kind not in _VALID or _VALID[kind](found[0]) else found[0]
