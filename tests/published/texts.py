"""Mixed texts from a seed: prose, code, Chinese, emoji, numbers, blanks, special tokens as text,
long runs."""

from __future__ import annotations

import random

_PROSE = (
    "the of and model token answer Kimi MoonShot HTTPServer getValue don't we'll I'M it's naïve "
    "Zürich Straße ŒUVRE привет мир Ελλάδα שלום مرحبا हिन्दी ไทย 안녕하세요 ǅungla ᾳ ﬁnal ſtart 'ſ "
    "'LL İstanbul"
)
_CODE = (
    "def f(x):\n    return x ** 2\n",
    "if (a != b) { c += 1; }\r\n",
    "\t\tfor i in range(10):",
    "<div class='x'/>",
    "x=>{}",
)
_CHINESE = (
    "你好，世界！",
    "強化學習",
    "模型的答案是什么？",
    "日本語のテキスト、カタカナ",
    "々〇〆",
    "𠀀𠮷𮯰",
    "中文abc混合123",
)
_EMOJI = ("🙂", "👩‍👩‍👧‍👦", "🇨🇳🇺🇸", "❤️", "1️⃣", "🏳️‍🌈", "🤷🏽‍♀️")
_NUMBERS = (
    "0",
    "42",
    "1234567",
    "3.14159",
    "1,000,000",
    "2026-11-26",
    "0x1F",
    "٣٤٥",
    "½²",
    "Ⅻ",
    "१२३",
)
_BLANKS = (
    " ",
    "  ",
    "\n",
    "\n\n",
    "\r\n",
    "\t",
    " \n ",
    "   \n\n  ",
    "\u00a0",
    "\u3000",
    "\u2028",
    "\x0b",
    "\x1c",
    "\x85",
)
_ODD = (
    "\x00",
    "\ufeff",
    "\u200d",
    "e\u0301",
    "a\u0308\u0323",
    "\ud7ff",
    "\U0010ffff",
    "_",
    "'",
    "''s",
    "ʼs",
    "'s's'S",
)
KINDS = (tuple(_PROSE.split()), _CODE, _CHINESE, _EMOJI, _NUMBERS, _BLANKS, _ODD)


def mixed_texts(count: int, specials: tuple[str, ...] = (), seed: int = 0) -> list[str]:
    """`count` texts of up to 40 pieces; every hundredth has a run of up to 3,000 characters."""
    chosen = random.Random(seed)
    kinds = (*KINDS, specials) if specials else KINDS
    texts = []
    for number in range(count):
        pieces = [chosen.choice(chosen.choice(kinds)) for _ in range(chosen.randint(0, 40))]
        if number % 100 == 0:
            pieces.append(
                chosen.choice(("a", "ab", " ", "\n", "中", "9", "=", "é", "A1 ", "🙂"))
                * chosen.randint(100, 3000)
            )
        if number % 3 == 0:
            pieces = [piece + chosen.choice(("", " ")) for piece in pieces]
        if number % 50 == 0:
            pieces += [
                chr(code)
                for code in (chosen.randrange(0x11_0000) for _ in range(20))
                if not 0xD800 <= code < 0xE000
            ]
        texts.append("".join(pieces))
    return texts
