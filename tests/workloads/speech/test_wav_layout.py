import struct

import numpy as np
import pytest

from tests.workloads.speech.recordings import tone, wav
from workloads.speech.wav_layout import DamagedClip, WavLayout, wav_layout


def layout(content: bytes) -> WavLayout:
    return wav_layout(lambda start, count: content[start : start + count], len(content))


def chunk(kind: bytes, content: bytes) -> bytes:
    return kind + struct.pack("<I", len(content)) + content + b"\0" * (len(content) % 2)


def riff(*chunks: bytes) -> bytes:
    body = b"WAVE" + b"".join(chunks)
    return b"RIFF" + struct.pack("<I", len(body)) + body


PCM = struct.pack("<HHIIHH", 1, 1, 16000, 32000, 2, 16)


def test_an_ordinary_file():
    assert layout(wav(tone())) == WavLayout(44, 32_000, 16_000, 1, is_pcm16=True)
    assert layout(wav(np.zeros(8), 8000, 2)) == WavLayout(44, 16, 8000, 2, is_pcm16=True)


def test_chunks_before_the_samples_are_passed_over():
    content = riff(
        chunk(b"JUNK", b"x" * 5001), chunk(b"fmt ", PCM), chunk(b"LIST", b"abc"), chunk(b"data", b"12345678")
    )
    found = layout(content)
    assert content[found.offset : found.offset + found.num_bytes] == b"12345678"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "empty"),
        (b"OggS" + bytes(99), "begins with b'OggS'"),
        (wav(tone())[:-1], "cut off: 31,999 of 32,000 bytes"),
        (wav(tone())[:30], "cut off or damaged"),
        (wav(tone()[:0]), "holds no samples"),
        (riff(chunk(b"data", b"1234")), "does not say what"),
        (riff(chunk(b"fmt ", bytes(16)), chunk(b"data", b"1234")), "0 channels at 0 Hz"),
        (b"RF64" + wav(tone())[4:], "of the kind RF64"),
    ],
)
def test_what_is_damaged_is_said(content: bytes, said: str):
    with pytest.raises(DamagedClip, match=said.replace(".", r"\.")):
        layout(content)
