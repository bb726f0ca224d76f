"""Damaged copies of a file's bytes, and hostile bytes."""

import pickle
import struct

from hypothesis import strategies as st


class _Code:
    """Writes the file ``ran`` when it is unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return open, ("ran", "w")


TOKENS = (
    *(b"", b"\0" * 8, b"\xff" * 8, b"\x7f\xff\xff\xff", b"\xff\xff\xff\x7f", b"\x80", b"\xff\xfe", b"\xef\xbb\xbf"),
    *(struct.pack("<q", -1), struct.pack("<I", 2**31), struct.pack("<d", float("nan")), struct.pack(">I", 10**9)),
    *(b"-1", b"0", b"nan", b"inf", b"1e999", b"9" * 400, b"null", b"true", b"{}", b"[]", b'""', b'"', b"'", b"\\"),
    *(b"\n", b"\r", b",", b";", b"\t", b"|", b"::", b"{", b"}", b":", b"=", b"#", b"&a", b"*a", b"---\n", b"%"),
    *(b"[" * 20_000, b'{"a":' * 5_000, b"x" * 200_000, b'"' + b"y" * 140_000, b"\n" * 5_000, b"," * 5_000),
    *(b"../../x", b"/etc/passwd", b"${oc.env:HOME}", b"${a}", b"\x1b[31m", "\u202e\ud7ff".encode(), b"\xed\xa0\x80"),
    *(b"!!python/object/apply:os.system ['touch ran']", b"_target_: os.system", pickle.dumps(_Code(), 2)),
)
"""Bytes that readers of some format have stumbled over."""


@st.composite
def damaged(draw: st.DrawFn, whole: bytes) -> bytes:
    """Draws a damaged copy of a file: a few bytes are changed, cut out, repeated or put in; rarely all are."""
    content = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(("set", "set", "token", "over", "cut", "delete", "repeat", "swap", "all")))
        at = draw(st.integers(0, min(len(content), 256)) | st.integers(0, len(content)))
        size = draw(st.integers(1, 16) | st.integers(1, 4096))
        if kind == "set":
            content[at : at + 1] = bytes([draw(st.integers(0, 255))])
        elif kind == "token":
            content[at:at] = draw(st.sampled_from(TOKENS))
        elif kind == "over":
            token = draw(st.sampled_from(TOKENS) | st.binary(max_size=16))
            content[at : at + len(token)] = token
        elif kind == "cut":
            del content[at:]
        elif kind == "delete":
            del content[at : at + size]
        elif kind == "repeat":
            content[at:at] = content[at : at + size] * draw(st.integers(1, 40))
        elif kind == "swap":
            other = draw(st.integers(0, len(content)))
            content[at : at + size], content[other : other + size] = (
                content[other : other + size],
                content[at : at + size],
            )
        elif draw(st.integers(0, 9)) == 0:
            content = bytearray(draw(st.binary(max_size=200)))
    return bytes(content)
