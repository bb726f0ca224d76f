import numpy as np

from workloads.speech.synthetic import spoken_words


def test_clips_belong_to_the_seed_and_their_number():
    first, again, other = (list(spoken_words(5, 3, 16_000, seed)) for seed in (0, 0, 1))
    more = list(spoken_words(8, 3, 16_000, 0))
    for (word, speaker, sound), (same_word, same_speaker, same) in zip(first, again, strict=True):
        assert (word, speaker) == (same_word, same_speaker)
        assert np.array_equal(sound, same)
    assert np.array_equal(more[4][2], first[4][2])
    assert not np.array_equal(other[0][2], first[0][2])
