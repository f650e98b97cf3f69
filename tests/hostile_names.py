"""Names that try to be something else: markup, escapes, formulas, paths, halves of characters. Always the same ones."""

from __future__ import annotations

import os
import random

_MARKUP = (
    "<script>window.pwned=1</script>",
    "<img src=x onerror=window.pwned=1>",
    '"><svg onload=window.pwned=1>',
    "'><iframe srcdoc='<script>parent.pwned=1</script>'>",
    "</script><script>window.pwned=1</script>",
    "</style><script>window.pwned=1</script>",
    "</title><img src=x onerror=window.pwned=1>",
    "<!--<script>window.pwned=1</script>-->",
    "<a href='javascript:window.pwned=1'>x</a>",
    "javascript:window.pwned=1",
    "data:text/html,<script>parent.pwned=1</script>",
    "<b>bold</b><br><i>x</i>",
    "&lt;script&gt;window.pwned=1&lt;/script&gt;",
    "&#60;script&#62;window.pwned=1",
    "<style>*{display:none}</style>",
    "<base href=//evil.example>",
    "<meta http-equiv=refresh content=0;url=//evil.example>",
    "<form action=//evil.example><button>x",
    "<math><mtext></mtext><script>window.pwned=1</script>",
    "<img src=//evil.example/x.png>",
    "<link rel=stylesheet href=//evil.example/x.css>",
    "${window.pwned=1}",
    "{{window.pwned=1}}",
    "{{constructor.constructor('window.pwned=1')()}}",
    "{% print(1) %}",
    "`${window.pwned=1}`",
    "');window.pwned=1;//",
    '";window.pwned=1;//',
    "%3Cscript%3Ewindow.pwned=1%3C/script%3E",
    "\\u003cscript\\u003ewindow.pwned=1",
    "<<SCRIPT>window.pwned=1//<</SCRIPT>",
    "<body onload=window.pwned=1>",
)
_TERMINAL = (
    "\x1b[31mred\x1b[0m",
    "\x1b]0;title\x07",
    "\x1b]8;;http://evil.example\x07link\x1b]8;;\x07",
    "\x1b[2J\x1b[H",
    "\x9b31m",
    "\x07\x08\x0b\x0c",
    "a\rb",
    "a\nb",
    "\x7f\x80\x85",
    "\x00",
)
_TEXT = (
    "\u202egnp.exe",
    "\u2066\u2067\u2068\u2069",
    "\u200b\u200c\u200d\ufeff",
    "\u2028\u2029",
    "\ud800",
    "\udcff",
    "\udfff\ud800",
    "Z\u0351\u0321a\u0334\u0315l\u0348g\u0360o" * 20,
    "\U0001f3f4\U000e0067\U000e0062",
    "\U0001f469\u200d\U0001f469\u200d\U0001f466",
    "عربى",
    "ﷺ" * 40,
    "\ufffe\uffff",
    "i\u0307İı",
    "ａｂｃ＜script＞",
)
_FORMULAS = (
    "=cmd|' /C calc'!A0",
    "=1+1",
    "+1+1",
    "-1+1",
    "@SUM(1)",
    '=HYPERLINK("http://evil.example")',
    "\t=1+1",
    "%0a=1",
)
_PATHS = (
    "../../etc/passwd",
    "..",
    ".",
    "/etc/passwd",
    "..\\..\\windows",
    "~root",
    "C:\\con",
    "CON",
    "%2e%2e%2f",
    "%00",
    "a/../b",
    "file:///etc/passwd",
    "//evil.example/x",
    "\\\\evil.example\\x",
    "?token=x",
    "#x",
    "a;b",
    "$(id)",
    "`id`",
    "| id",
    "-rf",
    "--help",
)
_JSON = (
    "__proto__",
    "constructor",
    "prototype",
    "hasOwnProperty",
    "toString",
    "null",
    "true",
    "NaN",
    '{"a":1}',
    "[]",
    "\\",
    '"',
    "'",
    "",
)
_SQL = ("'; DROP TABLE runs;--", "1 OR 1=1", "Robert'); DROP TABLE students;--")
SEEDS = (*_MARKUP, *_TERMINAL, *_TEXT, *_FORMULAS, *_PATHS, *_JSON, *_SQL)


def hostile_names(count: int = 500) -> list[str]:
    """So many different ones: each by itself, then joined with others, then one of 64 KiB."""
    dice = random.Random(20)
    names = dict.fromkeys(SEEDS)
    while len(names) < count - 1:
        names[dice.choice(("", " ", ".", "\x00", "é")).join(dice.sample(SEEDS, dice.randint(2, 3)))] = None
    names["<script>window.pwned=1</script>" + "x" * 65536] = None
    return list(names)


def file_names(count: int = 500) -> list[str]:
    """As many as a directory can be called: no slash, no NUL, 255 bytes at most, and none of them hidden."""
    found: dict[str, None] = {}
    for name in hostile_names(2 * count):
        plain = name.replace("/", "⁄").replace("\x00", "0").lstrip(".")
        # Bytes that are no UTF-8 are allowed; other halves of characters cannot be written.
        kept = "".join(
            sign if not "\ud800" <= sign < "\udc80" and not "\udcff" < sign <= "\udfff" else "?" for sign in plain
        )
        plain = os.fsdecode(os.fsencode(kept)[:200])
        if plain:
            found[plain] = None
    return list(found)[:count]
